"""Which policy event is legal where, and every way to be void: "live means proven" stands or falls here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schemas.ledger import Reason
from schemas.policy_fold import PolicyFold
from schemas.policy_state import Standing, VersionStatus, Void
from tests.fakes.log_script import G0, G1, PolicyScript, running

NEW_G0 = ("g0", "i2")


def reason(void: Void | None) -> str:
    return "" if void is None else void.reason


def switching() -> PolicyScript:
    """Version 0 live with g0 and g1; a switch s1 to version 1 is open and nobody has acked."""
    script, _ = running(G0, G1)
    script.published(1)
    script.switched("s1", 1, [G0, G1])
    return script


def test_every_event_of_an_ordinary_run_is_legal() -> None:
    script, _ = running(G0, G1, versions=2)
    script.joined(("g2", "i1"))
    script.loaded(("g2", "i1"), 1, None)
    script.admitted(("g2", "i1"), 1, script.last)
    script.published(2)
    script.switched("s2", 2, [G0, G1, ("g2", "i1")])
    script.load_failed(G0, 2, "s2")
    script.expired(G1)
    script.left(("g2", "i1"))
    script.failed("s2", 2)
    script.retired(0)
    script.branched(1)
    script.published(3, parent=1, depth=1)
    script.ended(3)
    script.started(segment=1)

    assert script.fold.void_count == 0
    assert script.fold.versions[1].status is VersionStatus.LIVE
    assert script.fold.versions[0].status is VersionStatus.RETIRED
    assert script.fold.versions[2].status is VersionStatus.FAILED


STORIES: tuple[tuple[str, str, Callable[[PolicyScript], Void | None]], ...] = (
    ("wrong switch id", "that switch is not open", lambda s: s.loaded(G0, 1, "s9")),
    ("ack of another version", "not the version of the switch", lambda s: s.loaded(G0, 0, "s1")),
    ("ack with other bytes", "other bytes", lambda s: s.loaded(G0, 1, "s1", manifest_sha256="x")),
    ("probe off", "probe does not match", lambda s: s.loaded(G0, 1, "s1", probe_diff_new=1e-3)),
    ("negative probe", "probe does not match", lambda s: s.loaded(G0, 1, "s1", probe_diff_new=-1.0)),
    ("stale keys", "old cached keys", lambda s: s.loaded(G0, 1, "s1", probe_diff_generated=1e-3)),
    ("NaN probe", "probe does not match", lambda s: s.loaded(G0, 1, "s1", probe_diff_new=float("nan"))),
    ("ack of a version nobody published", "no such version", lambda s: s.loaded(G0, 7, "s1")),
    ("ack of a stranger", "not current", lambda s: s.loaded(("g7", "i1"), 1, "s1")),
    ("ack of an old incarnation", "not current", lambda s: (s.joined(NEW_G0), s.loaded(G0, 1, "s1"))[1]),
    ("ack of a joiner", "does not decide", lambda s: (s.joined(NEW_G0), s.loaded(NEW_G0, 1, "s1"))[1]),
    ("second ack", "acked already", lambda s: (s.loaded(G0, 1, "s1"), s.loaded(G0, 1, "s1"))[1]),
    ("proof outside the switch of a version not live", "must be of the live", lambda s: s.loaded(G0, 1, None)),
    ("failure after the ack", "acked already", lambda s: (s.loaded(G0, 1, "s1"), s.load_failed(G0, 1, "s1"))[1]),
    ("failure for a closed switch", "that switch is not open", lambda s: s.load_failed(G0, 0, "s0")),
    ("failure of an old incarnation", "not a current", lambda s: s.load_failed(("g0", "i0"), 1, "s1")),
    ("activation without acks", "has not acked", lambda s: s.activated("s1", 1, ())),
    ("activation with one ack", "has not acked", lambda s: (s.loaded(G0, 1, "s1"), s.activated("s1", 1, [s.last]))[1]),
    ("activation of another version", "not the version", lambda s: s.activated("s1", 0, ())),
    ("activation of a closed switch", "that switch is not open", lambda s: s.activated("s0", 0, ())),
    ("failed while workers are left", "workers are left", lambda s: s.failed("s1", 1)),
    ("failed under another id", "that switch is not open", lambda s: s.failed("s9", 1)),
    ("a second switch", "another switch is open", lambda s: s.switched("s2", 1, [G0, G1])),
    ("wrong number", "expected 2", lambda s: s.published(3)),
    ("a number again", "expected 2", lambda s: s.published(1)),
    ("wrong parent", "parent 0, expected 1", lambda s: s.published(2, parent=0)),
    ("wrong depth", "is not parent's + 1", lambda s: s.published(2, depth=3)),
    ("deadline after the ack", "waits for it", lambda s: (s.loaded(G0, 1, "s1"), s.expired(G0, "switch_deadline"))[1]),
    ("lease of a stranger", "not a current", lambda s: s.expired(("g9", "i1"))),
    ("leaving twice", "not a current", lambda s: (s.left(G0), s.left(G0))[1]),
    ("joining twice", "joined already", lambda s: s.joined(G0)),
    ("retire the version of the switch", "live, newest", lambda s: s.retired(1)),
    ("retire live", "live, newest", lambda s: s.retired(0)),
    ("retire nothing", "no such version", lambda s: s.retired(9)),
    ("admit one that is admitted", "admitted already", lambda s: s.admitted(G0, 0, 4)),
    ("admit without proof", "no such proof", lambda s: (s.joined(NEW_G0), s.admitted(NEW_G0, 0, 4))[1]),
    ("admit a stranger", "not a current", lambda s: s.admitted(("g9", "i1"), 0, 4)),
    ("start a run that runs", "under way", lambda s: s.started(segment=1)),
    ("segment skipped", "segment 5", lambda s: s.started(segment=5)),
    ("end at another version", "newest is 1", lambda s: s.ended(0)),
    ("branch from nothing", "no such version", lambda s: s.branched(9)),
)  # fmt: skip


@pytest.mark.parametrize(("words", "tell"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES])
def test_an_illegal_event_is_void_and_says_why(words: str, tell: Callable[[PolicyScript], Void | None]) -> None:
    script = switching()

    assert words in reason(tell(script))
    assert script.fold.void_count == 1
    assert script.fold.live == 0


def test_activation_must_name_exactly_the_acks_of_the_switch() -> None:
    script = switching()
    script.loaded(G0, 1, "s1")
    first = script.last
    script.loaded(G1, 1, "s1")

    assert "the acks named are not" in reason(script.activated("s1", 1, [first]))
    assert reason(script.activated("s1", 1, [first, first + 1])) == ""
    assert script.fold.live == 1


def test_a_version_is_activated_once() -> None:
    script, proofs = running(G0)

    assert "that switch is not open" in reason(script.activated("s0", 0, [proofs[G0, 0]]))


def test_a_version_is_not_live_until_the_slowest_worker_acknowledges() -> None:
    script = switching()
    script.loaded(G0, 1, "s1")
    early = script.activated("s1", 1, [script.last])
    script.loaded(G1, 1, "s1")

    assert "has not acked" in reason(early)
    assert script.fold.live == 0
    assert script.activated("s1", 1, sorted(script.fold.switch.acks.values())) is None
    assert script.fold.versions[0].status is VersionStatus.WAS_LIVE


def test_activation_with_nobody_left_is_void() -> None:
    script = switching()
    script.expired(G0)
    script.expired(G1)

    assert "nobody is left" in reason(script.activated("s1", 1, ()))
    assert script.failed("s1", 1) is None
    assert script.fold.live == 0
    assert script.fold.failed_switches_in_row == 1


def test_the_rest_decide_when_a_worker_fails_to_load() -> None:
    script = switching()
    script.load_failed(G0, 1, "s1")
    script.loaded(G1, 1, "s1")

    assert script.activated("s1", 1, [script.last]) is None
    assert script.fold.workers["g0"].standing is Standing.JOINED
    assert script.fold.workers["g1"].standing is Standing.ADMITTED


def test_a_worker_that_misses_the_deadline_loses_its_standing_and_may_come_back_as_a_late_joiner() -> None:
    script = switching()
    script.loaded(G0, 1, "s1")
    ack = script.last
    script.expired(G1, "switch_deadline")
    late = script.loaded(G1, 1, "s1")
    script.activated("s1", 1, [ack])

    assert "does not decide" in reason(late)
    assert script.fold.workers["g1"].standing is Standing.JOINED
    assert script.loaded(G1, 1, None) is None
    assert script.admitted(G1, 1, script.last) is None
    assert script.fold.workers["g1"].standing is Standing.ADMITTED


def test_a_new_incarnation_in_an_open_switch_takes_the_old_ones_ack_away() -> None:
    script = switching()
    script.loaded(G0, 1, "s1")
    old_ack = script.last
    script.joined(NEW_G0)
    script.loaded(G1, 1, "s1")

    assert "the acks named are not" in reason(script.activated("s1", 1, [old_ack, script.last]))
    assert script.activated("s1", 1, [script.fold.switch.acks[G1]]) is None
    assert script.fold.workers["g0"].standing is Standing.JOINED


def test_a_worker_gone_before_the_switch_started_does_not_decide_it() -> None:
    script, _ = running(G0, G1)
    script.published(1)
    script.left(G1)

    assert script.switched("s1", 1, [G0, G1]) is None
    assert script.fold.switch.waiting_for == {G0}


@pytest.mark.parametrize(
    ("words", "version", "required"),
    [
        ("not newer than the live", 0, [G0]),
        ("no such version", 5, [G0]),
        ("at least one worker", 1, []),
        ("an admitted worker is missing", 1, [("g2", "i1")]),
        ("not admitted is required", 1, [G0, ("g2", "i1")]),
    ],
)
def test_a_switch_that_cannot_prove_anything_is_void(words: str, version: int, required: list) -> None:
    script, _ = running(G0)
    script.published(1)
    script.joined(("g2", "i1"))

    assert words in reason(script.switched("s1", version, required))
    assert script.fold.switch is None


def test_the_first_switch_is_decided_by_joined_workers() -> None:
    script = PolicyScript()
    script.started()
    script.published(0)
    script.joined(G0)

    assert script.switched("s0", 0, [G0]) is None
    assert script.loaded(G0, 0, "s0") is None
    assert script.activated("s0", 0, [script.last]) is None


def test_versions_jumped_over_are_superseded() -> None:
    script, _ = running(G0)
    script.published(1)
    script.goes_live(2, [G0])

    assert script.fold.versions[1].status is VersionStatus.SUPERSEDED
    assert not script.fold.was_activated(1)


def test_a_failed_version_may_be_tried_again_and_success_ends_the_row_of_failures() -> None:
    script, _ = running(G0)
    script.published(1)
    for number in range(2):
        script.switched(f"t{number}", 1, [G0])
        script.load_failed(G0, 1, f"t{number}", touched=True)
        script.failed(f"t{number}", 1)
        script.loaded(G0, 0, None)
        script.admitted(G0, 0, script.last)
    in_row = script.fold.failed_switches_in_row
    script.goes_live(1, [G0], publish=False)

    assert in_row == 2
    assert script.fold.void_count == 0
    assert script.fold.failed_switches_in_row == 0


def test_touched_weights_outside_a_switch_cost_the_standing() -> None:
    script, _ = running(G0, G1)
    script.load_failed(G0, 0, None, touched=False)
    untouched = script.fold.workers["g0"].standing
    script.load_failed(G0, 0, None, touched=True)

    assert untouched is Standing.ADMITTED
    assert script.fold.workers["g0"].standing is Standing.JOINED


@pytest.mark.parametrize(
    "tell",
    [
        lambda s: s.published(0),
        lambda s: s.branched(0),
        lambda s: s.switched("s", 0, [G0]),
        lambda s: s.ended(0),
        lambda s: s.failed("s", 0),
        lambda s: s.activated("s", 0, ()),
    ],
)
def test_nothing_is_decided_before_the_run_started(tell: Callable[[PolicyScript], Void | None]) -> None:
    assert reason(tell(PolicyScript())) == "before RunStarted"


def test_nothing_is_decided_after_the_run_ended_and_an_extension_goes_on() -> None:
    script, _ = running(G0)
    script.ended(0)
    after = [script.published(1), script.switched("s", 0, [G0]), script.ended(0), script.loaded(G0, 0, None)]

    assert [reason(void) for void in after] == ["after RunEnded"] * 3 + ["ack of an incarnation that is not current"]
    assert "segment 0, expected 1" in reason(script.started())
    assert script.started(segment=1) is None
    assert script.published(1) is None
    assert script.fold.live == 0


def test_workers_of_an_ended_run_prove_the_live_version_again_in_the_extension() -> None:
    script, _ = running(G0)
    script.ended(0)
    script.started(segment=1)
    again = ("g0", "i9")
    script.joined(again)
    script.published(1)

    assert "not admitted" in reason(script.switched("s1", 1, [again]))
    assert script.loaded(again, 0, None) is None
    assert script.admitted(again, 0, script.last) is None
    assert script.switched("s1", 1, [again]) is None


def test_version_zero_has_no_parent_and_depth_zero() -> None:
    script = PolicyScript()
    script.started()

    assert "no parent and depth 0" in reason(script.published(0, parent=0))
    assert "no parent and depth 0" in reason(script.published(0, depth=1))
    assert script.published(0) is None


def test_a_branch_start_keeps_its_parents_depth_and_the_next_version_counts_on() -> None:
    script, _ = running(G0, versions=4)
    script.branched(1)
    wrong = [script.published(4), script.published(4, parent=1, depth=2)]

    assert [reason(void) for void in wrong] == ["parent 3, expected 1", "a branch start keeps its parent's depth"]
    assert script.published(4, parent=1, depth=1) is None
    assert script.published(5, parent=4, depth=2) is None
    assert script.fold.branch_from is None


def test_a_version_that_is_being_branched_from_is_not_retired_and_a_retired_one_starts_no_branch() -> None:
    script, _ = running(G0, versions=3)
    script.branched(1)
    kept = script.retired(1)
    script.retired(0)

    assert "branched from" in reason(kept)
    assert "retired" in reason(script.branched(0))


def test_a_retired_version_is_neither_switched_to_nor_proven() -> None:
    script, _ = running(G0)
    script.published(1)
    script.published(2)
    script.retired(1)

    assert "retired" in reason(script.switched("s1", 1, [G0]))
    assert "retired" in reason(script.loaded(G0, 1, None))
    assert "retired" in reason(script.retired(1))


def test_lag_counts_training_steps_along_the_parents() -> None:
    script, _ = running(G0, versions=4)
    script.branched(1)
    script.published(4, parent=1, depth=1)
    script.published(5, parent=4, depth=2)
    lag = script.fold.lag

    assert [lag(v, 3) for v in (3, 2, 1, 0)] == [0, 1, 2, 3]
    assert [lag(v, 5) for v in (5, 4, 1, 0)] == [0, 1, 1, 2]
    assert [lag(v, 5) for v in (2, 3, 6)] == [Reason.OTHER_BRANCH] * 3
    assert lag(4, 3) is Reason.OTHER_BRANCH
    with pytest.raises(ValueError, match="version 9 is not in the fold"):
        lag(0, 9)


def test_the_ancestor_at_a_depth_is_found_along_the_branch() -> None:
    script, _ = running(G0, versions=4)
    script.branched(1)
    script.published(4, parent=1, depth=1)
    script.published(5, parent=4, depth=2)

    assert [script.fold.version_at_depth(5, depth) for depth in (2, 1, 0)] == [5, 4, 0]


def test_old_proofs_are_forgotten_but_those_of_the_live_version_and_all_versions_are_kept() -> None:
    script, _ = running(G0, versions=6)
    script.published(6)
    script.published(7)
    script.fold.forget_proofs_below(7)

    assert {proof.version for proof in script.fold.proofs.values()} == {5}
    assert set(script.fold.versions) == set(range(8)), "legality depends on them: nobody may remember others"
    assert script.fold.lag(2, 7) == 5


def test_memory_of_void_events_is_bounded_and_their_number_is_not_lost() -> None:
    script = PolicyScript()
    for _ in range(250):
        script.published(0)

    assert script.fold.void_count == 250
    assert len(script.fold.recent_voids) == 100


def test_offsets_go_forward_and_may_have_gaps() -> None:
    fold = PolicyFold()
    script = PolicyScript(fold)
    script.started()
    fold.skip_to(5)
    fold.skip_to(3)
    script.published(0)

    assert fold.read_up_to == 6
    with pytest.raises(ValueError, match="policy offset 2 was folded already"):
        fold.apply(2, script.events[0])
