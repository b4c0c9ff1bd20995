"""What a worker may not do, seen while a run is under way: take requests blind, or move the prompts group back.

The log does not tell afterwards what a worker had read when it began a group, nor what a commit has overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from producers.generator import GeneratorService
from schemas.topics import TopicName, topic

if TYPE_CHECKING:
    from tests.sim.world import Process, World

# Turns. Looking costs a few microseconds; half a second of slack is a hundred turns.
_LOG_EVERY = 10
_WORKER_EVERY = 3
_SLACK_S = 0.5
"""between two looks"""


class WorkerWatch:
    """Every violation so far; `look` after a turn of any process."""

    def __init__(self, world: World, run: str, lease_s: float) -> None:
        self._world = world
        self._policy = (topic(run, TopicName.POLICY), 0)
        self._group = f"{run}-generators"
        self._lease_s = lease_s
        self._turn = 0
        self._ends: list[tuple[float, int]] = []
        """(time, end of policy) as it was last seen to be so, ends going up; older than what matters is left out"""
        self._running: dict[str, tuple[int, frozenset[str]]] = {}
        """worker -> (its service, the groups it was working on)"""
        self._committed: dict[tuple[str, int], tuple[int, str]] = {}
        self.problems: list[str] = []

    def look(self, process: Process) -> None:
        """After a turn of this process."""
        self._turn += 1
        if self._turn % _LOG_EVERY == 0 or not self._ends:
            self._look_at_ends()
            self._look_at_commits()
        if self._turn % _WORKER_EVERY == 0 and isinstance(process.service, GeneratorService):
            self._look_at_worker(process.name, process.service)

    def _look_at_ends(self) -> None:
        now_s, end = self._world.clock.monotonic_s(), self._world.log.stable_end(self._policy)
        if self._ends and self._ends[-1][1] == end:
            self._ends[-1] = (now_s, end)
        else:
            self._ends.append((now_s, end))
        while len(self._ends) > 1 and now_s - self._ends[0][0] > 10 * self._lease_s:
            del self._ends[0]

    def _look_at_commits(self) -> None:
        committed = self._world.log.group(self._group).offsets
        if committed == self._committed:
            return
        for place, (offset, _) in committed.items():
            before = self._committed.get(place, (0, ""))[0]
            if offset < before:
                self.problems.append(f"G7: prompts[{place[1]}] was committed up to {before}, and then up to {offset}")
        self._committed = dict(committed)

    def _look_at_worker(self, name: str, service: GeneratorService) -> None:
        running = frozenset(service._running)
        known, before = self._running.get(name, (0, frozenset()))
        self._running[name] = (id(service), running)
        if known != id(service) or running <= before:
            return
        read_up_to, now_s = service._p.follower.read_up_to, self._world.clock.monotonic_s()
        blind_s = now_s - max((at_s for at_s, end in self._ends if end <= read_up_to), default=self._ends[0][0])
        if blind_s > self._lease_s + _SLACK_S:
            groups = ", ".join(sorted(running - before))
            self.problems.append(f"G7: {name} took {groups} and had not read policy to its end for {blind_s:.1f} s")
