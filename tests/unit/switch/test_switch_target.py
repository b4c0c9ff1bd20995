"""Which weights a worker should hold next, and whether it may sample: functions of the fold."""

from __future__ import annotations

from producers.switch_target import LoadTarget, load_target, may_serve
from tests.fakes.log_script import G0, G1, PolicyScript, running


def test_before_anything_is_published_there_is_nothing_to_load() -> None:
    script = PolicyScript()
    script.started()
    script.joined(G0)

    assert load_target(script.fold, G0, None) is None
    assert not may_serve(script.fold, G0, None)


def test_a_required_worker_loads_the_version_of_the_switch_once() -> None:
    script, _ = running(G0, G1)
    script.published(1)
    script.switched("s1", 1, [G0, G1])
    before = load_target(script.fold, G0, 0)
    script.loaded(G0, 1, "s1")

    assert before == LoadTarget(switch="s1", version=1)
    assert load_target(script.fold, G0, 1) is None
    assert load_target(script.fold, G1, 0) == LoadTarget(switch="s1", version=1)


def test_under_a_barrier_a_proven_version_is_served_only_when_it_is_live() -> None:
    script, _ = running(G0, G1)
    script.published(1)
    script.switched("s1", 1, [G0, G1])
    script.loaded(G0, 1, "s1")
    waiting = may_serve(script.fold, G0, 1)
    script.loaded(G1, 1, "s1")
    script.activated("s1", 1, sorted(script.fold.switch.acks.values()))

    assert not waiting
    assert may_serve(script.fold, G0, 1)
    assert may_serve(script.fold, G1, 0), "the version held was live: the trainer judges its age"


def test_a_late_joiner_loads_the_live_version_and_serves_after_its_admission() -> None:
    script, _ = running(G0)
    script.joined(G1)
    target = load_target(script.fold, G1, None)
    script.loaded(G1, 0, None)
    proven = (load_target(script.fold, G1, 0), may_serve(script.fold, G1, 0))
    script.admitted(G1, 0, script.last)

    assert target == LoadTarget(switch=None, version=0)
    assert proven == (None, False)
    assert may_serve(script.fold, G1, 0)


def test_a_late_joiner_whose_proof_was_overtaken_proves_the_new_live_version() -> None:
    script, _ = running(G0)
    script.joined(G1)
    script.loaded(G1, 0, None)
    script.goes_live(1, [G0])

    assert load_target(script.fold, G1, 0) == LoadTarget(switch=None, version=1)


def test_an_admitted_worker_in_doubt_proves_the_live_version_again() -> None:
    script, _ = running(G0)

    assert load_target(script.fold, G0, None) == LoadTarget(switch=None, version=0)
    assert not may_serve(script.fold, G0, None)
    assert load_target(script.fold, G0, 0) is None


def test_a_worker_that_is_not_current_or_whose_run_ended_does_nothing() -> None:
    script, _ = running(G0, G1)
    script.expired(G0)
    expired = (load_target(script.fold, G0, 0), may_serve(script.fold, G0, 0))
    script.ended(0)

    assert expired == (None, False)
    assert load_target(script.fold, G1, 0) is None
    assert not may_serve(script.fold, G1, 0)
