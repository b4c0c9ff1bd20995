"""Two runs compared: what makes them different is named with version, position, field and both values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.offline.diff import DiffReport, DiffSide, diff
from consumers.offline.diff.content import array_difference
from schemas import policy_events as ev
from schemas.checkpoint import WEIGHTS_NAME
from schemas.errors import IllegalState, RangeMissing
from schemas.ledger import Decision, Subject
from schemas.topics import TopicName, topic
from schemas.trajectory import Sampling
from tests.fakes.played_forge import manifest_and_event_that_fit
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN

FIRST = "tiny/p000000/e0/a0"
MASKED = np.array([-0.5, -0.25, 0.0], dtype=np.float32)
SETTINGS = {"trainer.max_lag": 1, "generator.workers": 2}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs that are the same until somebody forges the second."""

    a: TinyRun
    b: TinyRun

    def compare(self, settings: dict[str, Any] | None = None, **options: Any) -> DiffReport:
        return diff(side(self.a), side(self.b, settings), **options)


def side(run: TinyRun, settings: dict[str, Any] | None = None) -> DiffSide:
    return DiffSide(run.run_log(), run.store, settings or SETTINGS)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(TinyRun(tmp_path / "a"), TinyRun(tmp_path / "b"))


def first(report: DiffReport) -> tuple[int | None, int | None, str, Any, Any]:
    """(version, position, field, in A, in B)."""
    found = report.differences[0]
    return found.version_b, found.position, found.field, found.a, found.b


def test_two_equal_runs_are_equal_to_the_last_sha256(pair: Pair) -> None:
    report = pair.compare()

    assert report.equal
    assert (report.steps, report.rows, report.weights, report.weights_not_retained) == (3, 12, 4, 0)
    assert report.last_weights[0] == report.last_weights[1] != ""
    assert report.lines()[-1].startswith("equal: 3 steps, 12 rows, weights of 4 versions; the last weights have sha256")
    content = json.loads(report.to_json())
    assert (content["equal"], content["first"], content["rows_dropped"]) == (True, None, [{"duplicate": 2}] * 2)


def test_who_sampled_and_when_makes_no_difference(pair: Pair) -> None:
    forge = Forge(pair.b)
    changes = {"claim_id": "g7/i9/3", "worker_id": "g7", "incarnation": "i9", "started_at_us": 5, "text": "?"}
    for index in range(2):
        forge.edit_trajectory(f"{FIRST}/{index}", metadata={"host": "b"}, **changes)

    assert pair.compare().equal


def test_a_setting_is_told_and_is_no_difference_by_itself(pair: Pair) -> None:
    report = pair.compare({**SETTINGS, "generator.workers": 1, "new.key": True})

    assert report.equal
    assert report.config == {"generator.workers": (2, 1), "new.key": (None, True)}
    assert "  setting generator.workers: 2 / 1" in report.lines()


@pytest.mark.parametrize(
    ("changes", "field", "a", "b"),
    [
        ({"reward": 0.5}, "reward", 1.0, 0.5),
        ({"token_ids": np.array([3, 9, 5], dtype=np.int32)}, "token_ids[1]", 4, 9),
        ({"logprobs": np.array([-0.5, -0.25, -2.0], dtype=np.float32)}, "logprobs[2]", -1.0, -2.0),
        ({"loss_mask": np.array([True, True, False]), "logprobs": MASKED}, "logprobs[2]", -1.0, 0.0),
        ({"sampling": Sampling(temperature=0.5)}, "sampling.temperature", 1.0, 0.5),
        ({"finish_reason": "length"}, "finish_reason", "stop", "length"),
        ({"reward_parts": {"form": 1.0}}, "reward_parts", {}, {"form": 1.0}),
    ],
)
def test_another_row_is_named_by_position_field_and_both_values(
    pair: Pair, changes: dict[str, Any], field: str, a: Any, b: Any
) -> None:
    Forge(pair.b).edit_trajectory(f"{FIRST}/0", **changes)

    report = pair.compare()

    assert not report.equal
    assert first(report) == (1, 0, field, a, b)
    assert report.differences[0].row == "p000000/e0/a0/0"
    assert f"first difference: version 1, position 0 (p000000/e0/a0/0): {field}: " in "\n".join(report.lines())
    assert report.steps_that_differ == [1]


@pytest.mark.parametrize(("field", "value"), [("advantage", 0.25), ("weight", 0.5), ("policy_lag", 1)])
def test_another_decision_is_named(pair: Pair, field: str, value: float) -> None:
    Forge(pair.b).edit_decision(f"{FIRST}/1", **{field: value})

    assert first(pair.compare())[:3] == (1, 1, field)


def test_another_order_of_the_batch_is_named(pair: Pair) -> None:
    Forge(pair.b).edit_decisions(2, lambda rows: rows[::-1])

    report = pair.compare()

    assert first(report)[:3] == (2, None, "group decision 0")
    assert (2, 0, "row") in [(d.version_b, d.position, d.field) for d in report.differences]


def test_another_decision_about_a_group_is_named_with_its_reason(pair: Pair) -> None:
    def drop(rows: list[Any]) -> list[Any]:
        return [
            dataclasses.replace(r, decision=Decision.DROPPED, reason="incomplete") if r.subject is Subject.GROUP else r
            for r in rows
        ]

    Forge(pair.b).edit_decisions(3, drop)

    found = first(pair.compare())
    assert found[:3] == (3, None, "group decision 0")
    assert (found[3].endswith("trained"), found[4].endswith("dropped incomplete")) == (True, True)


def test_other_weights_are_named_by_file(pair: Pair) -> None:
    manifest_and_event_that_fit(Forge(pair.b), pair.b.store_root)

    report = pair.compare()

    assert first(report)[:3] == (2, None, f"sha256 of {WEIGHTS_NAME}")
    assert report.steps_that_differ == [2]
    assert "then" not in "\n".join(report.lines())


def test_a_shorter_run_differs_where_it_ends_and_is_equal_up_to_there(tmp_path: Path) -> None:
    pair = Pair(TinyRun(tmp_path / "a", versions=3), TinyRun(tmp_path / "b", versions=2))

    assert first(pair.compare()) == (None, None, "step", 3, "none")
    up_to = pair.compare(last=2)
    assert (up_to.equal, up_to.steps, up_to.rows) == (True, 2, 8)


def test_weights_that_are_not_retained_are_counted(pair: Pair) -> None:
    run = TinyRun(pair.b.store_root.parent / "c", end=False)
    run.append_event(ev.VersionRetired(run=RUN, at_us=1, version=1, rule="keep=2"))
    run.store.delete("tiny/a001/manifest.json")

    report = Pair(pair.a, run).compare(last=2)

    assert (report.equal, report.weights, report.weights_not_retained) == (True, 2, 1)
    assert "(1 more are not retained in both)" in report.lines()[-1]


def test_a_branch_is_compared_along_the_line_to_its_newest_version(pair: Pair) -> None:
    run = TinyRun(pair.b.store_root.parent / "c", end=False)
    published = [e.event for e in run.run_log().policy() if isinstance(e.event, ev.VersionPublished)]
    run.append_event(ev.BranchStarted(run=RUN, at_us=1, from_version=2))
    run.append_event(published[2].model_copy(update={"version": 4, "parent": 2}))

    report = Pair(pair.a, run).compare(last=2)

    assert (report.equal, report.steps) == (True, 2)
    assert first(Pair(pair.a, run).compare())[2:] == ("step", 3, "none")


def test_a_range_that_is_gone_is_one_message_that_names_the_run(pair: Pair) -> None:
    pair.b.log.drop_before(topic(RUN, TopicName.TRAJECTORIES), 2, 50)

    with pytest.raises(RangeMissing, match=r"run tiny: what version 1 .* retention removed trajectories\[2\] records"):
        pair.compare()


def test_a_row_that_cannot_be_read_is_one_message(pair: Pair) -> None:
    record = next(r for r in pair.b.records(TopicName.TRAJECTORIES) if r.key == FIRST.encode())
    Forge(pair.b).say_schema(record, b"trajectory/2.0")

    with pytest.raises(IllegalState, match=r"run tiny: version 1: .*this build knows trajectory/1.x; upgrade"):
        pair.compare()


def test_decisions_of_a_newer_schema_version_are_one_message(pair: Pair) -> None:
    record = Forge(pair.b).newer(TopicName.LEDGER, b"decisions/2.0")

    with pytest.raises(IllegalState) as caught:
        pair.compare()

    assert f"tiny.ledger[0]@{record.offset}: " in str(caught.value)
    assert "'decisions/2.0', this build knows decisions/1.x; upgrade the reader" in str(caught.value)


def test_arrays_are_compared_bit_for_bit() -> None:
    zeros = np.array([1.0, 0.0], dtype=np.float32)

    assert array_difference(zeros, zeros.copy()) is None
    assert array_difference(zeros, np.array([1.0, -0.0], dtype=np.float32)) == ("[1]", 0.0, -0.0)
    assert array_difference(zeros, zeros[:1]) == (" (length)", 2, 1)
