"""A consumer group in memory: members come and go, partitions are dealt out evenly and stay where they are.

Rebalances are immediate: the harshest timing a real group can show. Deterministic: by order of joining.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

Committed = tuple[int, str]
_SERIALS = itertools.count(1)


def checked(value: Committed) -> Committed:
    """As the broker: metadata has a limit."""
    if len(value[1].encode()) > 4096:
        raise ValueError(f"{len(value[1].encode())} bytes of metadata, the broker takes 4096")
    return value


@dataclass(slots=True, eq=False)
class Member:
    """One member; `owned` maps a partition to the number of its assignment."""

    process: str
    topic: str
    owned: dict[int, int] = field(default_factory=dict)
    silent_since_s: float | None = None


@dataclass(slots=True)
class MemoryGroup:
    """Offsets outlive members."""

    session_timeout_s: float
    offsets: dict[tuple[str, int], Committed] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    partitions: int = 0

    def join(self, member: Member, partitions: int) -> None:
        """A new member takes its share."""
        self.partitions = partitions
        self.members.append(member)
        self._rebalance()

    def leave(self, member: Member) -> None:
        """Its partitions go to the others."""
        if member in self.members:
            self.members.remove(member)
            member.owned.clear()
            self._rebalance()

    def silence(self, process: str, now_s: float) -> None:
        """The process died, or is not heard: it keeps its partitions until the session runs out."""
        for member in self.members:
            if member.process == process and member.silent_since_s is None:
                member.silent_since_s = now_s

    def speak(self, process: str) -> None:
        """The process is heard again; a member that was dropped meanwhile has to join again."""
        for member in self.members:
            if member.process == process:
                member.silent_since_s = None

    def expire(self, now_s: float) -> None:
        """Drop members that have been silent for a session."""
        for member in list(self.members):
            if member.silent_since_s is not None and now_s - member.silent_since_s >= self.session_timeout_s:
                self.leave(member)

    def _rebalance(self) -> None:
        if not self.members:
            return
        share, extra = divmod(self.partitions, len(self.members))
        # Those that own most keep the larger shares: fewest moves.
        order = sorted(self.members, key=lambda m: -len(m.owned))
        quotas = {id(m): share + (1 if i < extra else 0) for i, m in enumerate(order)}
        for member in self.members:
            for partition in sorted(member.owned)[quotas[id(member)] :]:
                del member.owned[partition]
        taken = {p for m in self.members for p in m.owned}
        free = [p for p in range(self.partitions) if p not in taken]
        for member in self.members:
            while free and len(member.owned) < quotas[id(member)]:
                member.owned[free.pop(0)] = next(_SERIALS)
