"""G8 while a run is under way: what each service holds in memory stays below bounds that follow from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from consumers.coordinator import CoordinatorService
from consumers.trainer.service import TrainerService
from producers.generator import GeneratorService

if TYPE_CHECKING:
    from tests.sim.world import Process, World

# Looking costs a few microseconds a turn; what grows without bound is still there two turns later.
_EVERY = 3
_CLAIMS_A_GROUP = 8


class BoundsWatch:
    """The largest size of each thing, and every bound that was passed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._turn = 0
        self.largest: dict[str, int] = {}
        self.problems: list[str] = []

    def look(self, process: Process) -> None:
        """After a turn of this process."""
        self._turn += 1
        if self._turn % _EVERY == 0 and process.service is not None:
            for name, (size, bound) in self._sizes(process.service).items():
                if size > self.largest.get(name, -1):
                    self.largest[name] = size
                    if size > bound:
                        self.problems.append(f"G8: {process.name} holds {size} {name}, at most {bound} are allowed")

    def _sizes(self, service: Any) -> dict[str, tuple[int, int]]:
        if isinstance(service, TrainerService):
            return self._trainer(service)
        if isinstance(service, CoordinatorService):
            return self._coordinator(service)
        return self._generator(service) if isinstance(service, GeneratorService) else {}

    def _trainer(self, service: TrainerService) -> dict[str, tuple[int, int]]:
        plan, desk = self._world.plan, service._desk
        if desk is None:
            return {}
        most_open = (plan.run_ahead + 1) * plan.groups_per_step
        held = [sum(1 for _ in buffer.rows()) for buffer in desk.assembler.buffers()]
        undecided = sum(len(offsets) for offsets in desk.progress._undecided.values())
        rows = most_open * plan.group_size
        per_group = 2 * _CLAIMS_A_GROUP * plan.group_size
        # One poll may bring a record for each of its rows beyond the limit at which reading stops.
        decisions = service._s.max_pending_decisions + service._s.poll_records * 2 * plan.group_size
        replay = plan.replay.steps * plan.groups_per_step + plan.groups_per_step
        return {
            "open groups": (len(desk.assembler), most_open),
            "rows of one group": (max(held, default=0), per_group),
            "undecided records": (undecided, most_open * per_group),
            "pending decisions": (len(desk.decisions), min(decisions, 400 + rows)),
            "dead letters": (len(desk.dead), 200),
            "replay groups": (len(desk.replay._entries), replay if plan.replay.steps else 0),
            "deadlines": (len(service._deadlines._deadline_s), 3 * most_open + 16 + most_open),
        }

    def _coordinator(self, service: CoordinatorService) -> dict[str, tuple[int, int]]:
        workers = self._world.plan.generators
        return {"leases": (len(service._leases), 2 * workers + 16 + workers)}

    def _generator(self, service: GeneratorService) -> dict[str, tuple[int, int]]:
        plan, intake = self._world.plan, service._intake
        in_flight = len(service._running) + len(service._outbox) + len(intake)
        finished = [len(claims._finished) for claims in intake._claims._partitions.values()]
        engine = service._p.engine
        return {
            "groups in flight": (in_flight, plan.groups_in_flight),
            "groups in the engine": (len(engine.running_groups()), plan.groups_in_flight),
            "finished offsets of a partition": (max(finished, default=0), 200),
            "watched incarnations": (len(intake._watch._claims), 1000),
            "proofs": (len(service._p.follower.fold.proofs), 257 * 4),
            "remembered void events": (len(service._p.follower.fold.recent_voids), 100),
        }
