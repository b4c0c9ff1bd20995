"""The worker's half of the switch: it holds what it has proven, and serves nothing while in doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.ports import EngineRequest
from producers.weights import Stage
from schemas.errors import CheckpointInvalid, CheckpointMissing
from schemas.policy_events import LoadFailed, VersionLoaded
from schemas.policy_state import Standing
from tests.fakes.log_script import G0
from tests.unit.generator.keeper_rig import KeeperRig, SlowExecutor, weights_of
from tests.unit.generator.requests_of import request_of


@pytest.fixture
def rig(tmp_path: Path) -> KeeperRig:
    return KeeperRig(tmp_path).holding_0()


def test_a_switch_goes_by_fetch_drain_load_probe_and_ack(rig: KeeperRig) -> None:
    rig.switch_to(1)
    stages = []
    while rig.keeper.held != 1:
        rig.step(1)
        stages.append(rig.keeper.stage)

    [ack] = rig.sent
    assert isinstance(ack, VersionLoaded)
    assert stages == [Stage.FETCHING, Stage.DRAINING, Stage.LOADING, Stage.PROVING, Stage.IDLE]
    assert (ack.switch, ack.version, ack.probe_diff_new) == ("s1", 1, 0.0)
    assert ack.probe_diff_old is not None
    assert not ack.weak
    assert set(ack.phase_s) >= {"fetching", "draining", "loading"}
    assert rig.script.fold.proofs[rig.script.last].version == 1


def test_the_first_proof_is_weak_because_there_was_nothing_to_tell_apart(tmp_path: Path) -> None:
    rig = KeeperRig(tmp_path)
    rig.script.started()
    rig.script.joined(G0)
    rig.script.published(0)
    rig.script.switched("s0", 0, [G0])
    rig.step()

    [ack] = rig.sent
    assert isinstance(ack, VersionLoaded)
    assert ack.weak


def test_wrong_bytes_are_refused_and_the_old_version_goes_on(rig: KeeperRig) -> None:
    """C08: the checksum of version 1 is wrong; nothing was touched."""
    rig.shelf.always = CheckpointInvalid("sha256 mismatch")
    rig.switch_to(1)
    rig.step()

    [failed] = rig.sent
    assert isinstance(failed, LoadFailed)
    assert (failed.switch, failed.reason, failed.weights_touched) == ("s1", "sha256 mismatch", False)
    assert rig.keeper.held == 0
    assert not rig.keeper.holds_back
    assert rig.script.fold.workers["g0"].standing is Standing.JOINED


def test_a_load_that_dies_before_touching_anything_leaves_the_old_version_served(rig: KeeperRig) -> None:
    """C08."""
    rig.engine.fail_load = "before"
    rig.switch_to(1)
    rig.step()

    assert [(type(e), e.weights_touched) for e in rig.sent if isinstance(e, LoadFailed)] == [(LoadFailed, False)]
    assert rig.keeper.held == 0
    assert rig.engine._weights == weights_of(0)


def test_a_load_that_dies_half_way_serves_nothing_until_a_full_good_load(rig: KeeperRig) -> None:
    """C08: the weights were touched; the worker proves the live version again before it serves."""
    rig.engine.fail_load = "after"
    rig.switch_to(1)
    rig.step()
    [failed] = rig.sent
    torn = rig.keeper.held
    rig.script.failed("s1", 1)
    rig.engine.fail_load = None
    rig.clock.advance(10)
    rig.step()

    assert isinstance(failed, LoadFailed)
    assert failed.weights_touched
    assert torn is None
    assert rig.keeper.held == 0
    assert rig.script.fold.workers["g0"].late_ack == (0, rig.script.last)


def test_a_load_that_works_at_the_second_try_is_a_good_load(tmp_path: Path) -> None:
    executor = SlowExecutor()
    rig = KeeperRig(tmp_path, executor).joining_late()
    rig.step(1)
    executor.work()
    rig.engine.fail_load = "after"
    rig.step(2)
    executor.work()
    rig.step(1)
    rig.engine.fail_load = None
    executor.work()
    rig.step()

    assert [type(event).__name__ for event in rig.sent] == ["VersionLoaded"]
    assert rig.keeper.held == 0


def test_weights_that_do_not_reproduce_the_probe_are_not_acked(rig: KeeperRig, tmp_path: Path) -> None:
    """C08: version 1's directory holds other weights than its probe was made with."""
    (tmp_path / "a1" / "model.safetensors").write_text(weights_of(9))
    rig.switch_to(1)
    rig.step()

    [failed] = rig.sent
    assert isinstance(failed, LoadFailed)
    assert "probe differs by" in failed.reason
    assert failed.weights_touched
    assert rig.keeper.held is None


def test_a_prefix_cache_that_outlives_the_load_is_not_acked_and_nothing_is_served_from_it(tmp_path: Path) -> None:
    """C06: clearing it fails once; the next load, which clears it, is a good one."""
    rig = KeeperRig(tmp_path, prefix_cache=True).holding_0()
    rig.engine.fail_load = "stale"
    rig.switch_to(1)
    rig.step()
    [failed] = rig.sent
    doubtful = rig.keeper.held
    rig.script.failed("s1", 1)
    rig.engine.fail_load = None
    rig.clock.advance(10)
    rig.step()

    assert isinstance(failed, LoadFailed)
    assert "generated tokens come from old cached keys" in failed.reason
    assert failed.weights_touched
    assert doubtful is None
    assert rig.keeper.held == 0
    assert [e.probe_diff_generated for e in rig.sent if isinstance(e, VersionLoaded)] == [0.0]


def test_weights_that_cannot_be_probed_after_the_load_leave_nothing_held(
    rig: KeeperRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C08: the load went well and the probe raised; the old weights are gone all the same."""
    load = rig.engine.load

    def break_scoring(directory: Path, version: int) -> None:
        load(directory, version)
        monkeypatch.setattr(rig.engine, "score", lambda ids, lengths: [[0.0]])

    monkeypatch.setattr(rig.engine, "load", break_scoring)
    rig.switch_to(1)
    rig.step()

    [failed] = rig.sent
    assert isinstance(failed, LoadFailed)
    assert "the engine scored 1" in failed.reason
    assert failed.weights_touched
    assert rig.keeper.held is None


def test_a_probe_that_cannot_be_read_is_a_failed_load_with_nothing_touched(rig: KeeperRig, tmp_path: Path) -> None:
    (tmp_path / "a1" / "probe.arrow").write_bytes(b"no probe")
    rig.switch_to(1)
    rig.step()

    [failed] = rig.sent
    assert isinstance(failed, LoadFailed)
    assert "probe.arrow of version 1" in failed.reason
    assert not failed.weights_touched
    assert rig.keeper.held == 0


def test_a_checkpoint_that_shows_up_late_is_waited_for(rig: KeeperRig) -> None:
    """C109: invisible for 30 s; meanwhile the old version is served."""
    rig.shelf.always = CheckpointMissing("not there")
    rig.switch_to(1)
    for _ in range(30):
        rig.step()
        rig.clock.advance(1)
        assert rig.keeper.held == 0
        assert not rig.keeper.holds_back
    rig.shelf.always = None
    rig.clock.advance(5)
    rig.step()

    assert rig.keeper.held == 1
    assert [type(event).__name__ for event in rig.sent] == ["VersionLoaded"]


def test_a_checkpoint_that_is_not_there_is_looked_for_with_growing_waits_and_at_the_limit_for_the_last_time(
    rig: KeeperRig,
) -> None:
    """C109."""
    rig.shelf.fetched.clear()
    rig.shelf.always = CheckpointMissing("not there")
    rig.switch_to(1)
    looks_s: list[float] = []
    begun_s = rig.clock.monotonic_s()
    while not rig.sent and rig.clock.monotonic_s() - begun_s < 70:
        rig.step(3)
        looks_s += [rig.clock.monotonic_s() - begun_s] * (len(rig.shelf.fetched) - len(looks_s))
        rig.clock.advance(0.5)

    assert looks_s == [0, 0.5, 1.5, 3.5, 7.5, *(12.5 + 5 * n for n in range(10)), 60]
    assert [type(event).__name__ for event in rig.sent] == ["LoadFailed"]
    assert rig.keeper.held == 0


def test_a_switch_that_ends_while_fetching_is_forgotten_and_the_next_one_loaded(tmp_path: Path) -> None:
    executor = SlowExecutor()
    rig = KeeperRig(tmp_path, executor)
    rig.script.started()
    rig.script.joined(G0, ("g1", "i1"))
    rig.script.published(0)
    rig.script.switched("s0", 0, [G0, ("g1", "i1")])
    rig.step(1)
    rig.script.expired(G0, "switch_deadline")
    rig.script.loaded(("g1", "i1"), 0, "s0")
    rig.script.activated("s0", 0, [rig.script.last])
    executor.work()
    rig.step(1)
    forgotten = (rig.keeper.stage, list(rig.sent))
    for _ in range(8):
        rig.step(1)
        executor.work()

    assert forgotten == (Stage.IDLE, [])
    assert [(type(e).__name__, e.switch) for e in rig.sent if isinstance(e, VersionLoaded)] == [("VersionLoaded", None)]


def test_running_groups_end_before_the_load(rig: KeeperRig) -> None:
    rig.engine.submit(EngineRequest(request=request_of(0), rng_seed=0))
    rig.switch_to(1)
    rig.step()
    draining = (rig.keeper.stage, rig.keeper.holds_back, rig.keeper.held)
    while rig.engine.busy():
        rig.engine.poll()
    rig.step()

    assert draining == (Stage.DRAINING, True, 0)
    assert rig.keeper.held == 1


def test_a_group_that_waits_for_its_environment_is_waited_for_although_the_engine_has_nothing_to_do(
    rig: KeeperRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.engine, "running_groups", lambda: frozenset({"demo/p000000/e0/a0"}))
    rig.switch_to(1)
    rig.step()
    waiting = (rig.keeper.stage, rig.engine.busy())
    monkeypatch.undo()
    rig.step()

    assert waiting == (Stage.DRAINING, False)
    assert rig.keeper.held == 1


def test_a_group_that_does_not_end_is_frozen_after_the_drain_time_out_and_goes_on_afterwards(rig: KeeperRig) -> None:
    rig.engine.submit(EngineRequest(request=request_of(0), rng_seed=0))
    rig.switch_to(1)
    rig.step()
    rig.clock.advance(2.1)
    rig.step(1)
    frozen = list(rig.engine.poll())
    rig.step()

    assert frozen == []
    assert rig.keeper.held == 1
    assert rig.engine.busy()
    rig.engine.poll()
    assert [c.segments[0].version for c in rig.engine.poll()] == [1] * 4


def test_an_ack_that_was_not_delivered_is_given_again(rig: KeeperRig) -> None:
    rig.lose_sends = 1
    rig.switch_to(1)
    rig.step(20)

    assert [type(event).__name__ for event in rig.sent] == ["VersionLoaded", "VersionLoaded"]
    assert rig.keeper.held == 1


def test_a_void_ack_is_no_proof_and_nothing_is_served_under_it(rig: KeeperRig) -> None:
    rig.switch_to(1)
    while rig.keeper.stage is not Stage.LOADING:
        rig.step(1)
    rig.script.expired(G0, "switch_deadline")
    rig.script.failed("s1", 1)
    rig.step(2)

    assert rig.script.fold.recent_voids[-1].type == "VersionLoaded"
    assert rig.keeper.held is None


def test_proofs_of_an_old_incarnation_count_for_nothing(rig: KeeperRig) -> None:
    rig.keeper.new_incarnation()

    assert rig.keeper.held is None


def test_a_late_joiner_proves_the_live_version_outside_of_any_switch(tmp_path: Path) -> None:
    rig = KeeperRig(tmp_path).joining_late()
    rig.step()

    assert [(e.switch, e.version) for e in rig.sent if isinstance(e, VersionLoaded)] == [(None, 0)]
    assert rig.keeper.held == 0


def test_failures_outside_a_switch_are_retried_with_growing_waits(tmp_path: Path) -> None:
    rig = KeeperRig(tmp_path).joining_late()
    rig.shelf.always = CheckpointInvalid("bad")
    counts = []
    for _ in range(40):
        rig.step(4)
        rig.clock.advance(1)
        counts.append(len(rig.sent))

    assert counts[0] == 1
    assert 4 <= counts[-1] <= 7


def test_loading_happens_off_the_thread_that_polls(tmp_path: Path) -> None:
    executor = SlowExecutor()
    rig = KeeperRig(tmp_path, executor).joining_late()
    rig.step(3)
    fetching = (rig.keeper.stage, rig.keeper.working_in_background)
    executor.work()
    rig.step(3)
    loading = (rig.keeper.stage, rig.keeper.working_in_background)

    assert fetching == (Stage.FETCHING, False)
    assert loading == (Stage.LOADING, True)
