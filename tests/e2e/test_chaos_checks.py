"""Every check of `make chaos`, tripped by changing one thing in a run that was whole."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.chaos import count_findings, result
from tests.e2e.chaos_checks import (
    attempt_findings,
    fate_findings,
    fault_findings,
    findings,
    record_findings,
    recovery_findings,
    time_findings,
)
from tests.e2e.chaos_disk import small_disk
from tests.e2e.chaos_hits import Traces
from tests.e2e.chaos_plan import (
    BASELINE,
    BROKER,
    COORDINATOR,
    SAME,
    TRAINER,
    Fault,
    Phase,
    What,
)
from tests.e2e.chaos_price import price
from tests.e2e.chaos_run import Outcome
from tests.e2e.chaos_samples import (
    G0,
    PLAN,
    SEEN,
    TRAINER_KILL,
    WHOLE,
    WHOLE_HITS,
    WHOLE_TRACES,
    fate,
    hit_of,
)


def test_a_whole_run_has_no_findings() -> None:
    assert findings(PLAN, WHOLE_HITS, WHOLE, SEEN, disk_deaths=0) == []


def test_a_baseline_in_which_something_recovered_is_not_whole() -> None:
    calm = Traces(
        deaths=Counter(), restarts=Counter(), broker_starts=1, resumed=0, in_doubt=0, store_full=0
    )  # fmt: skip
    joins = {"g0": 1, "g1": 1}

    assert recovery_findings((), (), calm, joins, 0) == []
    assert recovery_findings((), (), replace(calm, resumed=1), joins, 0) == ["the trainer resumed 1 times, expected 0"]
    assert recovery_findings((), (), replace(calm, in_doubt=1), joins, 0)[0].startswith("the trainer was in doubt 1")
    assert recovery_findings((), (), replace(calm, broker_starts=2), joins, 0) == [
        "the broker was started 2 times, expected 1"
    ]
    assert recovery_findings((), (), replace(calm, deaths=Counter({(G0, 1): 1})), joins, 0) == [
        "deaths ('generator-0', 1): 1, the faults explain none"
    ]
    assert recovery_findings((), (), calm, {"g0": 2, "g1": 1}, 0) == ["generator-0 joined 2 times, expected 1"]


def test_a_recovery_that_is_missing_is_found() -> None:
    lazy = replace(WHOLE_TRACES, restarts=Counter({G0: 1}), resumed=0)

    wrong = recovery_findings(PLAN.faults, WHOLE_HITS, lazy, WHOLE.joins, 0)

    assert wrong == [
        "restarts generator-0: 1, the faults explain generator-0: 1, trainer: 1",
        "the trainer resumed 0 times, expected 1",
    ]
    assert time_findings([hit_of(TRAINER_KILL, recovered_s=None)])[0].endswith("no sign of recovery")
    assert time_findings([hit_of(TRAINER_KILL, recovered_s=70.0)])[0].endswith("60 s to recover, at most 45")


def test_services_that_stood_still_come_back_by_themselves_and_only_the_broker_may_leave_the_trainer_in_doubt() -> None:
    quiet = Traces(deaths=Counter(), restarts=Counter(), broker_starts=1, resumed=0, in_doubt=0, store_full=0)
    doubting = replace(quiet, in_doubt=1, resumed=1)
    joins = {"g0": 1, "g1": 1}

    def wrong(service: str, traces: Traces, joins: dict[str, int] = joins) -> list[str]:
        fault = Fault(what=What.STOP, service=service)
        return recovery_findings((fault,), (hit_of(fault),), traces, joins, 0)

    assert wrong(BROKER, quiet) == wrong(BROKER, doubting) == wrong(COORDINATOR, quiet) == []
    assert wrong(BROKER, replace(doubting, in_doubt=2))[0] == "the trainer was in doubt 2 times, at most 1 expected"
    assert wrong(BROKER, replace(quiet, broker_starts=2)) == ["the broker was started 2 times, expected 1"]
    assert wrong(COORDINATOR, doubting)[0] == "the trainer was in doubt 1 times, at most 0 expected"
    assert wrong(COORDINATOR, quiet, {"g0": 2, "g1": 1}) == ["generator-0 joined 2 times, expected 1"]
    restarted = replace(quiet, restarts=Counter({COORDINATOR: 1}))
    assert wrong(COORDINATOR, restarted) == ["restarts coordinator: 1, the faults explain none"]


def test_a_death_in_a_recovery_is_no_resumption() -> None:
    again = hit_of(Fault(what=What.KILL, service=TRAINER, phase=Phase.RECOVERING))
    twice = replace(WHOLE_TRACES, deaths=Counter({(TRAINER, -9): 2}), restarts=Counter({TRAINER: 2}))
    hits = (WHOLE_HITS[0], again)
    faults = tuple(hit.fault for hit in hits)

    assert recovery_findings(faults, hits, twice, {"g0": 1, "g1": 1}, 0) == []


def test_a_fault_that_did_not_fire_or_missed_its_phase_is_found() -> None:
    missed = replace(WHOLE_HITS[0], phase=Phase.SAVING)

    assert fault_findings(PLAN.faults, WHOLE_HITS) == []
    assert fault_findings(PLAN.faults, WHOLE_HITS[:1]) == ["1 of 2 faults fired"]
    assert fault_findings(PLAN.faults[:1], [missed]) == [
        "fault 1 found the trainer saving, it was to hit it between_checkpoint_and_commit"
    ]
    assert fault_findings(PLAN.faults[:1], [WHOLE_HITS[1]])[0].startswith("fault 1 was kill generator-0, planned")
    assert fault_findings(PLAN.faults[:1], [replace(WHOLE_HITS[0], evidence="")])[0].endswith("that it fired")


def test_a_group_or_a_row_that_is_decided_twice_or_never_is_found() -> None:
    twice = replace(WHOLE, fates={"tiny/a": (fate(), fate())})
    rows = replace(WHOLE, row_decisions={(0, 0, 3): 2})

    assert fate_findings(WHOLE) == []
    assert "group tiny/a lies finished in the log and was decided 2 times" in fate_findings(twice)
    assert "group tiny/a lies finished in the log and was decided 0 times" in fate_findings(replace(WHOLE, fates={}))
    assert fate_findings(rows) == ["the row at trajectories[0]@0 row 3 was decided more than once"]


def test_a_record_that_was_acknowledged_and_is_gone_is_found() -> None:
    assert record_findings(SEEN, WHOLE) == []
    assert record_findings(SEEN, replace(WHOLE, records={})) == [
        "the acknowledged record trajectories[0]@0 is gone or changed"
    ]
    assert len(record_findings(SEEN, replace(WHOLE, records={(0, 0): "other"}))) == 1


def test_a_checkpoint_of_a_killed_trainer_that_became_a_version_is_found() -> None:
    hit = hit_of(TRAINER_KILL, attempts=frozenset({"a1"}))

    assert attempt_findings([hit], frozenset({"a0"})) == []
    assert len(attempt_findings([hit], frozenset({"a0", "a1"}))) == 1


def test_a_run_that_trained_too_little_or_fails_its_audit_is_found() -> None:
    summary = {**WHOLE.summary, "versions_trained": 1, "audit_findings": 2, "trajectories_in_log": 5}

    assert findings(PLAN, WHOLE_HITS, replace(WHOLE, summary=summary), SEEN, disk_deaths=0) == [
        "versions_trained is 1, expected 2",
        "audit_findings is 2, expected 0",
        "trained + dropped is not what lies in the log",
    ]


def test_the_result_names_what_is_off() -> None:
    outcomes = {
        name: Outcome(wrong=[], priced=price(WHOLE_HITS, WHOLE, "tiny"), summary=WHOLE.summary, weights_sha256=sha256)
        for name, sha256 in ((BASELINE, "w"), (SAME, "other"))
    }

    found = result(outcomes, [PLAN, PLAN], whole=False, wall_s=1.0)

    assert (found["kills"], found["faults_fired"], found["faults_planned"]) == (4, 4, 4)
    assert (found["recovery_s_median"], found["recovery_s_max"], found["final_sha256_equal"]) == (6.0, 6.0, False)
    assert found["wrong"] == ["the final weights of baseline and same differ: ['other', 'w']"]
    assert len(result(outcomes, [PLAN, PLAN], whole=True, wall_s=1.0)["wrong"]) == 4


def test_too_few_kills_are_found() -> None:
    assert count_findings({"trainer": 12, "broker": 3, "generator": 15}, {Phase.BETWEEN: 6}) == []
    assert count_findings({"trainer": 12, "broker": 3, "generator": 15}, {Phase.BETWEEN: 5}) == [
        "5 kills of the trainer between checkpoint and commit, at least 6 wanted"
    ]


def test_a_filled_disk_has_room_for_no_byte(tmp_path: Path) -> None:
    with small_disk(tmp_path / "store") as disk:
        if not disk.is_mounted:
            pytest.skip("no file system may be mounted here")
        disk.fill(0)

        with pytest.raises(OSError, match="No space left") as refused:
            (disk.root / "one").write_bytes(b"x")

        assert refused.value.errno == errno.ENOSPC
        disk.empty()
        (disk.root / "one").write_bytes(b"x")
    assert not (tmp_path / "store" / "one").exists()


def test_a_slow_median_is_found_when_all_runs_were_made() -> None:
    slow = tuple(replace(hit, recovered_s=30.0) for hit in WHOLE_HITS)
    outcome = Outcome(wrong=[], priced=price(slow, WHOLE, "tiny"), summary=WHOLE.summary, weights_sha256="w")

    found = result({"storm": outcome}, [PLAN], whole=True, wall_s=1.0)

    assert "the median recovery took 20 s, at most 15" in found["wrong"]
    assert result({"storm": outcome}, [PLAN], whole=False, wall_s=1.0)["wrong"] == []
