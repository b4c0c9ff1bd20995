"""Prompt requests, ledger decisions, scores, evaluations and probes."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schemas.arrow_columns import Columns, read_complete_rows
from schemas.arrow_stream import Format, read_batch, write_rows
from schemas.errors import InvalidRecord
from schemas.evaluation_codec import decode_evaluation, encode_evaluation, evaluation_headers
from schemas.headers import Headers, arrow_headers, event_type
from schemas.ledger import Decision, Subject
from schemas.ledger_codec import DECISIONS, decisions_headers, decode_decisions, encode_decisions
from schemas.probe_codec import PROBE, decode_probe, encode_probe
from schemas.prompt_codec import PROMPT, decode_request, encode_request, request_headers
from schemas.scores_codec import SCORES, decode_scores, encode_scores, scores_headers
from schemas.trajectory import Sampling
from tests.unit.schemas.make_examples import AT_US, decisions, evaluations, probe, request, same, scores


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(InvalidRecord) as caught:
        call(*args)
    return caught.value.code


def raw(fmt: Format, *rows: tuple[Any, ...]) -> tuple[bytes, Headers]:
    value = write_rows(fmt, rows)
    return value, arrow_headers(fmt.name, fmt.version, len(rows), value)


def test_a_request_comes_back_with_its_trace_from_the_header() -> None:
    value = encode_request(request())
    headers = request_headers(request(), value, "trainer")

    assert event_type(headers) == "PromptRequested"
    assert same(decode_request(value, headers), request())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"group_id": "nonsense"}, "bad_ids"),
        ({"attempt": 2}, "bad_ids"),
        ({"epoch": 2}, "bad_ids"),
        ({"prompt_id": ""}, "bad_ids"),
        ({"group_size": 0}, "bad_group_size"),
        ({"min_version": -1}, "bad_position"),
        ({"prompt_token_ids": np.array([], dtype=np.int32)}, "no_prompt_tokens"),
        ({"prompt_token_ids": np.array([1, -2], dtype=np.int32)}, "token_out_of_vocabulary"),
        ({"prompt_token_ids": np.array([1, 2])}, "schema_type:prompt_token_ids"),
        ({"sampling": Sampling(temperature=float("nan"))}, "bad_sampling"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_its_writer(change: dict[str, Any], code: str) -> None:
    assert refusal(encode_request, request(**change)) == code


def _prompt_row(**changes: Any) -> tuple[Any, ...]:
    value = encode_request(request())
    (row,) = read_complete_rows(PROMPT, read_batch(PROMPT, value, None))
    return tuple([changes.get(name, item) for name, item in zip(PROMPT.names, row, strict=True)])


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([_prompt_row(), _prompt_row()], "several_rows"),
        ([_prompt_row(task=None)], "null:task"),
        ([_prompt_row(prompt_token_ids=[1, None])], "null:prompt_token_ids"),
        ([_prompt_row(group_size=0)], "bad_group_size"),
        ([_prompt_row(reference=(("a", "1"), ("a", "2")))], "duplicate_key:reference"),
    ],
)
def test_a_request_is_checked_on_reading_too(rows: list[tuple[Any, ...]], code: str) -> None:
    assert refusal(decode_request, *raw(PROMPT, *rows)) == code


def test_decisions_on_trajectories_groups_and_records_come_back_equal() -> None:
    value = encode_decisions(decisions())

    assert decode_decisions(value, decisions_headers(decisions(), value, "trainer")) == decisions()


def test_no_decisions_make_no_record() -> None:
    assert refusal(encode_decisions, []) == "no_rows"


@pytest.mark.parametrize(
    "row",
    [
        replace(decisions()[0], partition=None),
        replace(decisions()[0], row_sha256=None),
        replace(decisions()[0], reason="stale"),
        replace(decisions()[0], decision=Decision.DROPPED),
        replace(decisions()[0], advantage=float("nan")),
        replace(decisions()[0], weight=float("inf")),
        replace(decisions()[1], group_id=None),
        replace(decisions()[1], reason="whim"),
        replace(decisions()[1], reason="invalid:"),
        replace(decisions()[2], offset=None),
        replace(decisions()[1], subject=Subject.RECORD),
    ],
)
def test_a_decision_that_says_nothing_certain_is_refused(row: Any) -> None:
    assert refusal(encode_decisions, [decisions()[0], row]) == "bad_decision"


def test_a_decision_of_an_unknown_kind_is_refused_on_reading() -> None:
    row = ("trajectory", "g", "t", 0, 0, 0, "ab", "pondered", "", 0, 1.0, 1, None, None, 1, AT_US, "")

    assert refusal(decode_decisions, *raw(DECISIONS, row)) == "bad_decision"
    assert refusal(decode_decisions, *raw(DECISIONS, (*row[:7], None, *row[8:]))) == "null:decision"


def test_scores_come_back_as_measured() -> None:
    rows = (*scores(), replace(scores()[1], proximal=np.array([np.nan, -np.inf], dtype=np.float32)))
    value = encode_scores(rows)

    decoded = decode_scores(value, scores_headers(rows, value, "trainer", AT_US))

    assert same(decoded, rows)
    with pytest.raises(ValueError, match="read-only"):
        decoded[0].proximal[0] = 1.0


def test_scores_of_unequal_length_or_type_are_refused() -> None:
    short = np.array([-1.0], dtype=np.float32)

    assert refusal(encode_scores, [replace(scores()[0], reference=short)]) == "length_mismatch"
    assert refusal(encode_scores, [replace(scores()[0], proximal=np.array([-1.0]))]) == "schema_type:proximal"
    assert refusal(decode_scores, *raw(SCORES, ("t", 1, short, np.ones(2, dtype=np.float32)))) == "length_mismatch"
    assert refusal(decode_scores, *raw(SCORES, ("t", 1, None, None))) == "null:proximal"


def test_evaluations_come_back_equal() -> None:
    value = encode_evaluation(evaluations())

    assert decode_evaluation(value, evaluation_headers(evaluations(), value, "evaluator")) == evaluations()


def test_a_probe_comes_back_equal() -> None:
    assert same(decode_probe(encode_probe(probe())), probe())


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (([1, 2, 3], 3, []), "length_mismatch"),
        (([1, 2, 3], 0, [-1.0, -1.0, -1.0]), "length_mismatch"),
        (([1, 2, 3], 1, [-1.0]), "length_mismatch"),
        (([1, 2, -3], 2, [-1.0]), "token_out_of_vocabulary"),
        (([1, 2, 3], 2, [float("nan")]), "nan_logprob"),
        (([1, 2, None], 2, [-1.0]), "null:token_ids"),
        (([1, 2, 3], None, [-1.0]), "null:prompt_length"),
    ],
)
def test_a_probe_that_cannot_be_scored_is_refused(row: tuple[Any, ...], code: str) -> None:
    assert refusal(decode_probe, write_rows(PROBE, [row])) == code


def test_a_probe_above_its_size_limit_is_refused() -> None:
    assert refusal(decode_probe, encode_probe(probe()), 100) == "too_large"


def test_a_probe_is_not_written_with_other_types_or_lengths() -> None:
    (good,) = probe()

    wide: Any = np.arange(5, dtype=np.int64)
    assert refusal(encode_probe, [replace(good, token_ids=wide)]) == "schema_type:token_ids"
    assert refusal(encode_probe, [replace(good, prompt_length=4)]) == "length_mismatch"
    assert refusal(encode_probe, []) == "no_rows"


@pytest.mark.parametrize("count", [1, 3, 300, 5_000])
@pytest.mark.parametrize("texts", [["same"], [""], ["a", "bc"], ["aa", "a", "aaa"], ["\u00e9t\u00e9", "x"]])
def test_texts_come_back_whatever_their_sizes_and_number(count: int, texts: list[str]) -> None:
    """Equal ASCII texts are read at once, and lengths that add up the same way must not pass for equal ones."""
    rows = [(texts[i % len(texts)], i, np.zeros(1, dtype=np.float32), None) for i in range(count)]
    batch = read_batch(SCORES, write_rows(SCORES, rows), None)

    assert [row[:2] for row in read_complete_rows(SCORES, batch)] == [row[:2] for row in rows]


@pytest.mark.parametrize("missing", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_a_null_list_among_others_stays_null(missing: tuple[int, ...]) -> None:
    own = [np.arange(i + 1, dtype=np.float32) for i in range(4)]
    rows = [(f"t{i}", 1, own[i], None if i in missing else own[i]) for i in range(4)]
    read = read_complete_rows(SCORES, read_batch(SCORES, write_rows(SCORES, rows), None))

    assert [i for i, row in enumerate(read) if row[3] is None] == list(missing)
    for i, row in enumerate(read):
        assert row[2].tolist() == own[i].tolist() and not row[2].flags.writeable
        assert row[3] is None or (row[3].tolist() == own[i].tolist() and not row[3].flags.writeable)


def test_a_null_cannot_hide_behind_a_validity_buffer_of_no_bytes() -> None:
    """That nulls are looked for only where a validity buffer has bytes rests on this."""
    rows = [(f"t{i}", None if i == 1 else 7, np.ones(2, dtype=np.float32), None) for i in range(3)]
    value = write_rows(SCORES, rows)
    batch = len(SCORES.schema_message)
    metadata = range(batch + 8, batch + 8 + struct.unpack_from("<i", value, batch + 4)[0] - 8)
    refused = 0
    for at in (at for at in metadata if struct.unpack_from("<q", value, at)[0] == 1):  # lengths of a byte, among others
        forged = bytearray(value)
        struct.pack_into("<q", forged, at, 0)
        try:
            read = read_batch(SCORES, bytes(forged), None)
        except InvalidRecord as error:
            refused += error.code == "arrow_invalid"
        else:
            nulls = sum(read.column(name).null_count for name in ("trajectory_id", "version_in", "proximal"))
            assert Columns(SCORES, read).may_have_nulls == (nulls > 0)

    assert refused == 2  # of version_in, and of the list that may be null
