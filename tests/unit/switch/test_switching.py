"""What the coordinator decides, as a table of policy states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from consumers.switching import LastSeen, SwitchRules, Timeouts, decide
from schemas import policy_events as ev
from schemas.policy_state import VersionStatus
from tests.fakes.log_script import G0, G1, PolicyScript, running

RULES = SwitchRules(run="demo", mode="barrier", switch_deadline_s=8.0, keep="all")
CALM = Timeouts(expired={}, switch_deadline_passed=False, may_open=True)
SEEN = LastSeen(at_us=5, offset=9)


def decided(script: PolicyScript, timeouts: Timeouts = CALM, rules: SwitchRules = RULES) -> list[ev.AnyPolicyEvent]:
    """The decision, checked to be legal in the fold it was made from."""
    events = decide(script.fold, timeouts, rules, "new", 0)
    for event in events:
        assert script.tell(event) is None, event
    return events


def types(events: list[ev.AnyPolicyEvent]) -> list[str]:
    return [event.type for event in events]


def switching(*acked: tuple[str, str]) -> PolicyScript:
    script, _ = running(G0, G1)
    script.published(1)
    script.switched("s1", 1, [G0, G1])
    for key in acked:
        script.loaded(key, 1, "s1")
    return script


def prepared(*tell: Callable[[PolicyScript], object]) -> PolicyScript:
    script = PolicyScript()
    for one in tell:
        one(script)
    return script


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        ((), []),
        ((lambda s: s.joined(G0),), []),
        ((lambda s: s.started(),), []),
        ((lambda s: s.started(), lambda s: s.published(0)), []),
        ((lambda s: s.started(), lambda s: s.published(0), lambda s: s.joined(G0)), ["SwitchStarted"]),
        ((lambda s: s.started(), lambda s: s.joined(G0), lambda s: s.published(0), lambda s: s.left(G0)), []),
        (
            (lambda s: s.started(), lambda s: s.published(0), lambda s: s.joined(G0), lambda s: s.ended(0)),
            [],
        ),
    ],
)
def test_a_switch_opens_when_the_run_has_a_version_and_a_worker(
    tell: tuple[Callable[[PolicyScript], object], ...], expected: list[str]
) -> None:
    assert types(decided(prepared(*tell))) == expected


def test_the_switch_goes_to_the_newest_version_and_requires_every_admitted_worker() -> None:
    script, _ = running(G0, G1)
    script.joined(("g2", "i1"))
    script.published(1)
    script.published(2)

    [event] = decided(script)

    assert isinstance(event, ev.SwitchStarted)
    assert (event.switch, event.version, event.deadline_s) == ("new", 2, 8.0)
    assert [(ref.worker, ref.incarnation) for ref in event.required] == [G0, G1]
    assert event.read_up_to == script.fold.read_up_to - 1


def test_the_first_switch_requires_the_joined_workers() -> None:
    script = prepared(lambda s: s.started(), lambda s: s.published(0), lambda s: s.joined(G0, G1))

    [event] = decided(script)

    assert isinstance(event, ev.SwitchStarted)
    assert len(event.required) == 2


def test_nothing_is_opened_while_it_may_not_or_the_newest_is_live_or_nobody_is_admitted() -> None:
    live, _ = running(G0)
    waiting, _ = running(G0)
    waiting.published(1)
    alone, _ = running(G0)
    alone.published(1)
    alone.left(G0)
    alone.joined(G1)

    assert decided(live) == []
    assert decided(waiting, replace(CALM, may_open=False)) == []
    assert decided(alone) == []


@pytest.mark.parametrize(("acked", "expected"), [((), []), ((G0,), []), ((G1,), []), ((G0, G1), ["VersionActivated"])])
def test_a_version_is_activated_by_the_last_required_ack(
    acked: tuple[tuple[str, str], ...], expected: list[str]
) -> None:
    assert types(decided(switching(*acked))) == expected


def test_the_rest_decide_when_one_is_out() -> None:
    script = switching(G1)
    script.load_failed(G0, 1, "s1")

    assert types(decided(script)) == ["VersionActivated"]
    assert script.fold.live == 1


def test_a_switch_that_nobody_is_left_in_fails_with_every_reason() -> None:
    script = switching()
    script.load_failed(G0, 1, "s1")
    script.expired(G1)

    [event] = decided(script)

    assert isinstance(event, ev.VersionFailed)
    assert event.reason == "no worker left: g0/i1: load failed: planted; g1/i1: expired: lease"
    assert script.fold.versions[1].status is VersionStatus.FAILED


def test_a_worker_without_heartbeat_expires_with_its_last_one() -> None:
    script = switching(G1)

    [event] = decided(script, replace(CALM, expired={G0: SEEN}))

    assert isinstance(event, ev.WorkerExpired)
    assert (event.worker, event.reason, event.last_heartbeat_at_us, event.last_heartbeat_offset) == (
        "g0",
        "lease",
        5,
        9,
    )
    assert types(decided(script)) == ["VersionActivated"]


def test_a_worker_that_is_gone_already_does_not_expire_again() -> None:
    script, _ = running(G0)

    assert decided(script, replace(CALM, expired={G1: SEEN})) == []


def test_the_deadline_takes_out_those_that_have_not_acked() -> None:
    script = switching(G0)

    events = decided(script, replace(CALM, switch_deadline_passed=True))

    assert [(e.worker, e.reason) for e in events if isinstance(e, ev.WorkerExpired)] == [("g1", "switch_deadline")]
    assert types(decided(script)) == ["VersionActivated"]


def test_a_worker_that_misses_lease_and_deadline_expires_once() -> None:
    script = switching()

    events = decided(script, replace(CALM, expired={G0: SEEN}, switch_deadline_passed=True))

    assert [(e.worker, e.reason) for e in events if isinstance(e, ev.WorkerExpired)] == [
        ("g0", "lease"),
        ("g1", "switch_deadline"),
    ]
    assert types(decided(script)) == ["VersionFailed"]


def test_after_a_failed_switch_the_same_version_is_tried_again_once_workers_have_proven_the_live_one() -> None:
    script, _ = running(G0)
    script.published(1)
    script.switched("s1", 1, [G0])
    script.load_failed(G0, 1, "s1", touched=True)
    failed = types(decided(script))
    nobody = types(decided(script))
    script.loaded(G0, 0, None)

    assert (failed, nobody) == (["VersionFailed"], [])
    assert types(decided(script)) == ["WorkerAdmitted"]
    [again] = decided(script)
    assert isinstance(again, ev.SwitchStarted)
    assert again.version == 1


def test_a_late_joiner_is_admitted_also_while_a_switch_is_open() -> None:
    script = switching()
    script.joined(("g2", "i1"))
    script.loaded(("g2", "i1"), 0, None)
    ack = script.last

    [event] = decided(script)

    assert isinstance(event, ev.WorkerAdmitted)
    assert (event.worker, event.version, event.ack) == ("g2", 0, ack)


def retired(script: PolicyScript, keep: int) -> list[int]:
    events = decided(script, replace(CALM, may_open=False), replace(RULES, keep=keep))
    return [event.version for event in events if isinstance(event, ev.VersionRetired)]


def test_old_versions_are_retired_but_never_the_live_one_or_one_in_a_switch() -> None:
    script, _ = running(G0, versions=2)
    for version in range(2, 7):
        script.published(version)
    script.switched("s", 6, [G0])

    assert retired(script, 3) == [0, 2, 3]
    assert retired(script, 3) == []


def test_a_version_that_is_being_branched_from_is_kept() -> None:
    script, _ = running(G0, versions=5)
    script.branched(1)

    assert retired(script, 2) == [0, 2]


def test_a_pinned_version_is_kept_until_it_is_unpinned_and_nothing_is_said_of_it_meanwhile() -> None:
    """The fold voids a retirement of it: a coordinator that went by age alone would write one after the other."""
    script, _ = running(G0, versions=5)
    assert script.tell(ev.VersionPinned(run="demo", at_us=0, version=1, reason="best so far")) is None
    while_pinned = [retired(script, 2), retired(script, 2)]
    assert script.tell(ev.VersionUnpinned(run="demo", at_us=0, version=1)) is None

    assert while_pinned == [[0, 2], []]
    assert retired(script, 2) == [1]


def test_nothing_is_retired_when_all_are_kept() -> None:
    script, _ = running(G0, versions=5)

    assert decided(script) == []
