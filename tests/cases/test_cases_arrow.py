"""Public failure cases about Arrow payloads, from the log to the trainer: C76, C79, C82, C84, C87."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.ports import Completion
from schemas.errors import InvalidRecord
from schemas.headers import DEAD_CODE
from schemas.ledger import Subject
from schemas.scores_codec import decode_scores
from schemas.topics import TopicName
from schemas.trajectory_codec import decode_group, encode_group, group_message_headers
from schemas.trajectory_schema import TRAJECTORY
from tests.cases.damage import batch_of, stream_of
from tests.cases.trainer_rig import TrainerRig
from tests.fakes.log_script import LIMITS, group
from tests.unit.generator.generator_rig import GeneratorRig


def headers_of(value: bytes, rows: int) -> Any:
    return TRAJECTORY.headers(rows=rows, value=value, source="g0", at_us=0, event_id="x")


def test_c76_a_payload_that_was_cut_costs_that_record_and_nothing_else(tmp_path: Path) -> None:
    """C76: a batch cut short, nothing at all, three bytes past a boundary, plain text, null; then a good group."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, versions=1).begin()
    rows = rig.rows(rig.requests()[0], [1, 0, 0, 1])
    value = encode_group(rows)
    damaged = [value[:-10], b"", value[:3], b"plain text", None, value[: len(value) // 2]]
    for payload in damaged:
        rig.send_bytes(payload, headers_of(payload or b"", 4), partition=1)
    rig.send(rows, partition=1)
    rig.step(6)
    rig.wait(2)

    dead = rig.records(TopicName.DEADLETTERS)
    codes = [(letter.header(DEAD_CODE) or b"").decode() for letter in dead]
    assert [letter.value for letter in dead] == damaged
    assert codes[4] == "empty_value"
    assert all(codes)
    assert [step.trajectories for step in rig.steps()] == [4]
    assert [d.offset for d in rig.decisions() if d.subject is Subject.RECORD] == [0, 1, 2, 3, 4, 5]


def test_c79_rows_without_values_do_not_change_the_types_of_those_that_follow(tmp_path: Path) -> None:
    """C79: in the first record every reward and every text is missing, in the second they are there."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=1, versions=2).begin()
    first, second = rig.requests()[:2]
    empty = rig.rows(first, [None] * 4)
    full = [replace(row, text="x", metadata={"a": "b"}) for row in rig.rows(second, [1, 0, 0, 1])]
    mixed = [replace(row, metadata={} if i == 0 else {"version": "7"}) for i, row in enumerate(full)]
    schemas = {batch_of(encode_group(rows)).schema.serialize().to_pybytes() for rows in (empty, full, mixed)}
    rig.send(empty)
    rig.send(full)
    rig.step(8)
    again = rig.requests()[-1]
    rig.answer(again.request_position)
    rig.step(8)

    assert len(schemas) == 1
    assert rig.told()[:3] == [
        (first.group_id, "dropped", "reward_failed"),
        (again.group_id, "trained", ""),
        (second.group_id, "trained", ""),
    ]
    decoded = decode_group(encode_group(mixed), group_message_headers(mixed, encode_group(mixed), "x"), LIMITS)
    assert [row.trajectory.metadata for row in decoded if row.trajectory] == [{}, *[{"version": "7"}] * 3]


def test_c82_a_record_cut_out_of_a_larger_batch_trains_on_its_own_tokens_only(tmp_path: Path) -> None:
    """C82: completions of 1, 2 and 3 tokens; a record holds rows 1 and 2 of the batch."""
    rig = TrainerRig(tmp_path, groups_per_step=1, group_size=2, run_ahead=0, versions=1).begin()
    request = rig.requests()[0]
    tokens = [[1], [2, 3], [4, 5, 6]]
    rows = []
    for index, ids in enumerate(tokens):
        [row] = rig.rows(request, [float(index % 2)], segments=[(0, len(ids), rig.proofs[0])], group_size=2)
        rows.append(
            replace(
                row, token_ids=np.array(ids, dtype=np.int32), index_in_group=max(0, index - 1),
                trajectory_id=f"{request.group_id}/{max(0, index - 1)}",
            )
        )  # fmt: skip
    value = stream_of(batch_of(encode_group(rows)).slice(1, 2))
    read = decode_group(value, headers_of(value, 2), LIMITS)
    rig.send_bytes(value, headers_of(value, 2))
    rig.step(4)

    assert [row.trajectory.token_ids.tolist() for row in read if row.trajectory] == [[2, 3], [4, 5, 6]]
    [scores] = rig.records(TopicName.SCORES)
    assert [len(row.proximal) for row in decode_scores(scores.value, scores.headers)] == [2, 3]


def test_c84_training_can_not_write_into_what_came_from_the_log(tmp_path: Path) -> None:
    """C84: a learner that adds 1 in place; the record and what is decoded from it stay as they were."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, versions=1).begin()
    refusals = []
    learner = rig.trainer._p.learner
    train = learner.train

    def editing(batch: Any) -> Any:
        for row in batch.rows:
            try:
                row.trajectory.token_ids += 1
            except ValueError as error:
                refusals.append(str(error))
        return train(batch)

    learner.train = editing  # type: ignore[method-assign]
    rig.answer(0)
    [record] = rig.records(TopicName.TRAJECTORIES)
    before = hashlib.sha256(record.value or b"").hexdigest()
    rig.step(4)
    [after] = rig.records(TopicName.TRAJECTORIES)

    rows = decode_group(after.value, after.headers, LIMITS)
    assert refusals == ["output array is read-only"] * 4
    assert hashlib.sha256(after.value or b"").hexdigest() == before
    assert [row.trajectory.token_ids.tolist() for row in rows if row.trajectory] == [[3, 4]] * 4
    assert [d.row_sha256 for d in rig.decisions() if d.row is not None] == [row.row_sha256 for row in rows]


def test_c87_an_empty_record_is_a_dead_letter_with_its_reason(tmp_path: Path) -> None:
    """C87: a group whose completions were all filtered out arrives as a batch without rows."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, versions=1).begin()
    rows = rig.rows(rig.requests()[0], [1, 0, 0, 1])
    value = stream_of(batch_of(encode_group(rows)).slice(0, 0))
    rig.send_bytes(value, headers_of(value, 0))
    rig.send(rows)
    rig.step(6)
    rig.wait(2)

    [dead] = rig.records(TopicName.DEADLETTERS)
    assert dead.header(DEAD_CODE) == b"no_rows"
    assert [step.trajectories for step in rig.steps()] == [4]
    with pytest.raises(InvalidRecord, match="an empty group is not published"):
        encode_group([])


def test_c87_a_completion_without_a_token_is_refused_and_its_siblings_are_accounted(tmp_path: Path) -> None:
    """C87: one of four completions is empty: the worker loses that row with a reason and publishes the rest."""
    rig = GeneratorRig(tmp_path).serving()
    whole = rig.engine._completion

    def sometimes_empty(asked: Any, index: int) -> Completion:
        completion = whole(asked, index)
        if index != 2:
            return completion
        nothing = np.array([], dtype=np.float32)
        return replace(completion, token_ids=nothing.astype(np.int32), logprobs=nothing, segments=())

    rig.engine._completion = sometimes_empty  # type: ignore[method-assign]
    rig.ask(0)
    rig.until(lambda: rig.committed(0) == 1)

    assert sorted(row.index_in_group for row in rig.rows()) == [0, 1, 3]
    assert rig.service._outbox.lost_rows == 1


def test_c87_a_row_without_a_token_is_decided_with_its_reason_by_the_trainer(tmp_path: Path) -> None:
    """C87: a foreign writer's row of no tokens: refused alone, and never divided by its length."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, versions=1).begin()
    rows = rig.rows(rig.requests()[0], [1, 0, 0, 1])
    batch = batch_of(encode_group(rows))
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    for name in ("token_ids", "logprobs", "loss_mask", "segments"):
        columns[name][1] = []
    value = stream_of(type(batch).from_pydict(columns, schema=batch.schema))
    rig.send_bytes(value, headers_of(value, 4))
    rig.step(4)
    rig.wait(2)

    reasons = [d.reason for d in rig.decisions() if d.subject is Subject.TRAJECTORY]
    assert sorted(reasons) == ["incomplete"] * 3 + ["invalid:no_tokens"]
    assert rig.steps() == []
    assert group(rig.requests()[0].group_id, [1.0], group_size=4)[0].token_ids.size == 2
