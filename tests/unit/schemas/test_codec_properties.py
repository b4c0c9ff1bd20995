"""Round trips over generated values, and random damage: only InvalidRecord may come out of a decoder."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InvalidRecord
from schemas.headers import Headers
from schemas.trajectory import Sampling, Segment, Trajectory
from schemas.trajectory_codec import decode_group, encode_group, group_message_headers, row_sha256
from schemas.trajectory_validate import clean_tokens, row_fault
from tests.unit.schemas.make_examples import LIMITS, Example, examples, same, trajectory

TEXT = st.text(max_size=20)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
MICROSECONDS = st.integers(-(2**62), 2**62)


@st.composite
def trajectories(draw: st.DrawFn, index: int) -> Trajectory:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    total = sum(lengths)
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    values = draw(
        st.lists(st.floats(-(2.0**99), 0, width=32), min_size=total, max_size=total),
    )
    return trajectory(
        index,
        prompt_token_ids=np.array(draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)), dtype=np.int32),
        token_ids=np.array(draw(st.lists(st.integers(0, 99), min_size=total, max_size=total)), dtype=np.int32),
        logprobs=np.where(mask, np.array(values, dtype=np.float32), np.float32(0.0)),
        loss_mask=np.array(mask, dtype=np.bool_),
        segments=tuple(
            [Segment(version=draw(st.integers(0, 2**62)), length=n, proof=draw(st.integers(0, 9))) for n in lengths]
        ),
        sampling=Sampling(
            temperature=draw(st.floats(0, 5)),
            logit_bias=tuple(draw(st.lists(st.tuples(st.integers(0, 99), FINITE), max_size=2))),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=2))),
        ),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        reward=draw(st.none() | FINITE),
        reward_parts=draw(st.dictionaries(TEXT, FINITE, max_size=3)),
        reward_error=draw(st.none() | TEXT),
        started_at_us=draw(MICROSECONDS),
        text=draw(st.none() | TEXT),
        metadata=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.tuples(*[trajectories(i) for i in range(n)])))
def test_whatever_can_be_written_comes_back_equal_with_the_same_hashes(rows: tuple[Trajectory, ...]) -> None:
    value = encode_group(rows)

    decoded = decode_group(value, group_message_headers(rows, value, "g"), LIMITS)

    assert same([row.trajectory for row in decoded], list(rows))
    assert [row.row_sha256 for row in decoded] == [row_sha256(row) for row in rows]


LOGPROBS = st.sampled_from([0.0, -0.0, -0.5, 5e-7, 1e-6, 2e-6, float("nan"), float("inf"), -float("inf")])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 101), LOGPROBS, st.booleans()), min_size=1, max_size=6),
    st.lists(st.integers(-1, 101), min_size=1, max_size=3),
)
def test_the_check_of_a_whole_group_never_passes_what_the_check_of_a_row_refuses(
    tokens: list[tuple[int, float, bool]], prompt: list[int]
) -> None:
    ids, logprobs, mask = zip(*tokens, strict=True)
    row = trajectory(
        0,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        loss_mask=np.array(mask, dtype=np.bool_),
        segments=(Segment(version=1, length=len(ids), proof=1),),
    )

    clean = clean_tokens(row.prompt_token_ids, row.token_ids, row.logprobs, row.loss_mask, LIMITS.vocabulary_size)

    assert clean == (row_fault(row, LIMITS) is None)


ARROW = [example for example in examples() if example.path.endswith(".arrow")]


@pytest.mark.parametrize("example", ARROW, ids=lambda e: e.path)
def test_random_damage_gives_a_reason_or_checked_values_and_nothing_else(example: Example) -> None:
    rng = random.Random(example.path)
    outcomes = {"read": 0, "refused": 0}
    tracemalloc.start()
    try:
        for _ in range(1_000):
            value = _damage(rng, example.value)
            outcomes[_outcome(example, value, _sized(example.headers, value))] += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert outcomes["refused"] > 100
    assert peak < 64 * 1024 * 1024


def _damage(rng: random.Random, value: bytes) -> bytes:
    data = bytearray(value)
    kind = rng.randrange(6)
    # Most bytes of a small record are its schema, where nearly all damage ends early: half of it goes behind.
    start = rng.choice([0, value.index(b"\xff\xff\xff\xff", 8)])
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        at = rng.randrange(len(data))
        return bytes(data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:])
    for _ in range(rng.randrange(1, 5)):
        if kind == 2:
            at = rng.randrange(start // 4, len(data) // 4) * 4
            data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80"])
        else:
            data[rng.randrange(start, len(data))] = rng.randrange(256)
    return bytes(data)


def _sized(headers: Headers | None, value: bytes) -> Headers:
    return (*(headers or ()), ("payload-bytes", str(len(value)).encode()))


def _outcome(example: Example, value: bytes, headers: Headers) -> str:
    try:
        decoded: Any = example.decode(value, headers)
    except InvalidRecord:
        return "refused"
    assert decoded is not None
    return "read"
