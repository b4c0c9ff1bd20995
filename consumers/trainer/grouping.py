"""Assembles prompt groups from records, by claim. Holds only groups of the open set, so memory is bounded (G8).

All trained members of a group come from one claim; the first complete claim wins. A record's rows are
decided together: a row that is refused waits for the fate of its record's group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from consumers.trainer.positions import RecordKey
from schemas.ledger import OpenGroup, Reason
from schemas.trajectory import DecodedRow, Trajectory

_MAX_CLAIMS_PER_GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRow:
    """A row of a held record. `refusal` is set when the row can never be trained, whatever its group does."""

    key: RecordKey
    row: DecodedRow
    refusal: str = ""
    """reason code for the ledger"""
    detail: str = ""

    @property
    def trajectory(self) -> Trajectory:
        """The decoded row; only for rows that decoded."""
        assert self.row.trajectory is not None
        return self.row.trajectory


@dataclass(slots=True)
class Claim:
    """What one worker incarnation has delivered for one group."""

    members: dict[int, HeldRow] = field(default_factory=dict)
    """index in group -> good row"""
    broken: list[HeldRow] = field(default_factory=list)
    """rows that failed validation: the claim can never be complete"""

    def is_complete(self, group_size: int) -> bool:
        """Every member is there and good."""
        return len(self.members) == group_size and not self.broken

    def is_spoilt(self, group_size: int) -> bool:
        """Every member is there, but not all are good."""
        return bool(self.broken) and len(self.members) + len(self.broken) >= group_size


@dataclass(slots=True)
class GroupBuffer:
    """An open group and what arrived for it."""

    group: OpenGroup
    claims: dict[str, Claim] = field(default_factory=dict)
    refused: list[HeldRow] = field(default_factory=list)
    """duplicates and conflicts inside records that also carry members"""
    winner: str | None = None
    """claim id, once complete"""

    def spoilt_claim(self, group_size: int) -> Claim | None:
        """A claim that delivered every member, but not all of them good."""
        return next((claim for claim in self.claims.values() if claim.is_spoilt(group_size)), None)

    def is_incomplete(self, group_size: int) -> bool:
        """More rows may still come."""
        return self.winner is None and self.spoilt_claim(group_size) is None

    def rows(self) -> Iterable[HeldRow]:
        """Everything that is held for the group."""
        for claim in self.claims.values():
            yield from claim.members.values()
            yield from claim.broken
        yield from self.refused

    def records(self) -> set[RecordKey]:
        """The records those rows lie in."""
        return {row.key for row in self.rows()}


class Assembler:
    """The open set and its buffers. Mutable; rebuilt from the Position on restart."""

    def __init__(self, open_groups: Iterable[OpenGroup], group_size: int) -> None:
        self.group_size = group_size
        self._buffers = {group.group_id: GroupBuffer(group) for group in open_groups}

    def __len__(self) -> int:
        return len(self._buffers)

    def open_groups(self) -> tuple[OpenGroup, ...]:
        """The open set, by request position."""
        return tuple(sorted((b.group for b in self._buffers.values()), key=lambda g: g.request_position))

    def buffers(self) -> list[GroupBuffer]:
        """All open groups in the order they are to be trained: oldest intended step first, then request position."""
        return sorted(self._buffers.values(), key=lambda b: (b.group.intended_step, b.group.request_position))

    def open(self, group: OpenGroup) -> None:
        """A request was issued."""
        if group.group_id in self._buffers:
            raise AssertionError(f"group {group.group_id} is open already")
        self._buffers[group.group_id] = GroupBuffer(group)

    def close(self, group_id: str) -> GroupBuffer:
        """Take the group out: its slot is free. The only way a slot is freed."""
        return self._buffers.pop(group_id)

    def add(self, key: RecordKey, rows: tuple[DecodedRow, ...]) -> list[HeldRow]:
        """Take one record (rows of one group). Returns its rows when they are all to be decided now."""
        buffer = self._buffers.get(rows[0].group_id)
        if buffer is None:
            return [_refuse(key, row, Reason.GROUP_CLOSED, "not in the open set") for row in rows]
        held = [self._place(buffer, key, row) for row in rows]
        if not any(placed for _, placed in held):
            return [row for row, _ in held]
        buffer.refused.extend(row for row, placed in held if not placed)
        return []

    def _place(self, buffer: GroupBuffer, key: RecordKey, row: DecodedRow) -> tuple[HeldRow, bool]:
        """Put the row where it belongs: (row, placed). A row that is not placed carries its refusal."""
        if buffer.winner is not None and row.claim_id != buffer.winner:
            return _refuse(key, row, Reason.DUPLICATE, f"claim {buffer.winner} was complete first"), False
        if row.claim_id not in buffer.claims and len(buffer.claims) >= _MAX_CLAIMS_PER_GROUP:
            return _refuse(key, row, Reason.DUPLICATE, f"more than {_MAX_CLAIMS_PER_GROUP} claims"), False
        trajectory = row.trajectory
        if trajectory is not None and trajectory.group_size != self.group_size:
            detail = f"group_size {trajectory.group_size}, the run asks for {self.group_size}"
            return _refuse(key, row, Reason.CONFLICT, detail), False
        claim = buffer.claims.setdefault(row.claim_id, Claim())
        if trajectory is None:
            held = _refuse(key, row, Reason.NONE, "")
            # Beside a complete claim it has no place: a trained group decides its members, losers and refused rows.
            if buffer.winner is not None or len(claim.broken) >= self.group_size:
                return held, False
            claim.broken.append(held)
            return held, True
        first = claim.members.get(trajectory.index_in_group)
        if first is not None:
            same = first.row.row_sha256 == row.row_sha256
            reason = Reason.DUPLICATE if same else Reason.CONFLICT
            return _refuse(key, row, reason, f"index {trajectory.index_in_group} of this claim came before"), False
        held = HeldRow(key=key, row=row)
        claim.members[trajectory.index_in_group] = held
        if buffer.winner is None and claim.is_complete(self.group_size):
            buffer.winner = trajectory.claim_id
        return held, True


def _refuse(key: RecordKey, row: DecodedRow, reason: Reason, detail: str) -> HeldRow:
    refusal = reason.value if row.trajectory is not None else f"invalid:{row.code}"
    return HeldRow(key=key, row=row, refusal=refusal, detail=detail if row.trajectory is not None else row.detail)
