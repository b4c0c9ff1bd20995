"""C109 with the settings a run has unless told otherwise: the worker's waits and the coordinator's deadline agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.switching import LastSeen, SwitchRules, Timeouts, decide
from infra.config import Config
from infra.ports import EngineRequest
from producers.weights import WeightsSettings
from schemas.errors import CheckpointMissing
from schemas.policy_events import WorkerExpired
from tests.unit.generator.keeper_rig import KeeperRig
from tests.unit.generator.requests_of import request_of

CONFIG = Config()
GENERATOR, DEADLINE_S = CONFIG.generator, CONFIG.coordinator.switch_deadline_s
LIMITS = WeightsSettings(
    run="demo",
    in_flight=GENERATOR.in_flight,
    drain_timeout_s=GENERATOR.drain_timeout_s,
    fetch_timeout_s=GENERATOR.fetch_timeout_s,
    load_tries=GENERATOR.load_tries,
    retry_wait_s=1.0,
    probe_tolerance=GENERATOR.tolerance("float32"),
)
RULES = SwitchRules(run="demo", mode="barrier", switch_deadline_s=DEADLINE_S, keep="all")


class Switch:
    """Worker g0 and a coordinator that judge a switch to version 1, whose checkpoint is not there yet."""

    def __init__(self, root: Path) -> None:
        self.rig = KeeperRig(root, limits=LIMITS).holding_0()
        self.rig.shelf.always = CheckpointMissing("not there")
        self.rig.switch_to(1)
        self.types: list[str] = []
        """what the coordinator wrote"""
        self._opened_s = self.rig.clock.monotonic_s()

    def until_decided(self) -> float:
        """Seconds until the switch is over, or a while after the deadline; both step every second."""
        rig = self.rig
        while rig.script.fold.switch is not None and self._gone_s() < DEADLINE_S + 30:
            rig.step()
            timeouts = Timeouts(
                expired=dict[tuple[str, str], LastSeen](),
                switch_deadline_passed=self._gone_s() >= DEADLINE_S,
                may_open=False,
            )
            for event in decide(rig.script.fold, timeouts, RULES, "next", 0):
                assert rig.script.tell(event) is None, event
                self.types.append(event.type)
            rig.clock.advance(1)
        return self._gone_s()

    def serve_for(self, seconds: int) -> None:
        """The worker goes on under version 0 meanwhile."""
        for _ in range(seconds):
            self.rig.step()
            assert (self.rig.keeper.held, self.rig.keeper.holds_back) == (0, False)
            self.rig.clock.advance(1)

    def _gone_s(self) -> float:
        return self.rig.clock.monotonic_s() - self._opened_s


@pytest.mark.parametrize("group_runs", [False, True], ids=["idle", "a-group-that-does-not-end"])
def test_a_checkpoint_visible_after_most_of_the_limit_is_served_and_its_worker_not_expired(
    tmp_path: Path, group_runs: bool
) -> None:
    """C109."""
    switch = Switch(tmp_path)
    if group_runs:
        switch.rig.engine.submit(EngineRequest(request=request_of(0), rng_seed=0))
    switch.serve_for(int(0.9 * GENERATOR.fetch_timeout_s))
    switch.rig.shelf.always = None

    assert switch.until_decided() < DEADLINE_S
    assert switch.types == ["VersionActivated"]
    assert (switch.rig.script.fold.live, switch.rig.keeper.held) == (1, 1)


def test_of_a_checkpoint_that_never_shows_up_the_worker_says_so_before_it_would_be_expired(tmp_path: Path) -> None:
    """C109: the reason in the log is the worker's, and it goes on with version 0."""
    switch = Switch(tmp_path)

    assert switch.until_decided() < DEADLINE_S
    assert [event.type for event in switch.rig.sent] == ["LoadFailed"]
    assert switch.types == ["VersionFailed"]
    assert not any(isinstance(event, WorkerExpired) for event in switch.rig.script.events)
    assert switch.rig.keeper.held == 0


def test_with_a_deadline_below_the_workers_own_waits_it_would_be_expired_without_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check of the configuration keeps out."""
    monkeypatch.setattr(f"{__name__}.DEADLINE_S", 30.0)
    switch = Switch(tmp_path)
    switch.until_decided()

    assert switch.types == ["WorkerExpired", "VersionFailed"]
    assert switch.rig.sent == []
