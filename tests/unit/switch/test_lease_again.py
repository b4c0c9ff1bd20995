"""A lease that runs out a second time is a new question: the ends that were taken for the first do not answer it."""

from __future__ import annotations

from tests.fakes.log_script import G0, G1
from tests.unit.switch.test_coordinator import POLICY, WORKERS, Rig, settle


class StallingRig(Rig):
    """A broker of which the coordinator gets nothing of some topics for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.stalled: set[str] = set()
        client = self.log.client
        self.log.client = lambda name, **_: client(name, arrivals=self.arrivals)  # type: ignore[method-assign]

    def arrivals(self, topic: str, partition: int) -> int:
        return 0 if topic in self.stalled else 1000


def test_a_worker_that_was_heard_after_its_lease_is_not_expired_by_what_was_read_before() -> None:
    """G0 and G1 are overdue; G0 speaks again, and is overdue again only because its heartbeats lie unread."""
    rig = StallingRig()
    service = rig.coordinator()
    rig.go_live(service)
    rig.say("joined", G1)
    settle(service)
    rig.stalled = {POLICY}
    rig.say("joined", ("g2", "i1"))  # policy has an end that is not read yet
    rig.clock.advance(6.1)
    settle(service)
    rig.beat()
    settle(service)
    rig.stalled = {POLICY, WORKERS}
    for _ in range(7):
        rig.clock.advance(1)
        rig.beat()
        settle(service)
    rig.stalled = {WORKERS}
    settle(service)
    rig.stalled = set()
    settle(service)

    expired = [(e.worker, e.reason) for e in rig.events() if e.type == "WorkerExpired"]  # type: ignore[union-attr]
    assert expired == [(G1[0], "lease")]
    assert service.silent_s()[G0[0]] == 0.0
