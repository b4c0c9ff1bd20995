"""Cost of the trajectory codec beside what else could carry a group: bytes, encode and decode CPU time.

Every competitor does the same job: checked trajectories -> bytes -> checked trajectories with row hashes. Part
of that job (`common_us`: building the values, hashing rows) costs all of them the same; `*_bare` ratios are
without it and without the writer's checks. Runs are interleaved and the fastest of each is taken, because the
machine is shared. A competitor that is not installed is left out. Run: python -m benchmarks.bench_codec
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.arrow_stream import Row, write_rows
from schemas.ids import GroupId, Incarnation, WorkerId, claim_id, trajectory_id
from schemas.row_hash import finish_row, group_prefix
from schemas.trajectory import Fingerprint, Sampling, Segment, Trajectory
from schemas.trajectory_codec import TrajectoryLimits, decode_group, encode_group, group_message_headers
from schemas.trajectory_schema import (
    GROUP_COLUMNS,
    TRAJECTORY,
    fingerprint_from_row,
    from_row,
    sampling_from_row,
    to_row,
)
from schemas.trajectory_validate import clean_tokens, row_fault


def installed(name: str) -> Any:
    """The module, or None where it is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


msgspec, orjson, msgpack, cloudpickle = map(installed, ("msgspec", "orjson", "msgpack", "cloudpickle"))

VOCABULARY = 49_152
_DTYPES = (np.int32, np.int32, np.float32, np.bool_)
_SAMPLING = TRAJECTORY.names.index("sampling")
_FINGERPRINT = TRAJECTORY.names.index("fingerprint")
LIMITS = TrajectoryLimits(vocabulary_size=VOCABULARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One way to carry a group."""

    name: str
    encode: Callable[[Sequence[Trajectory]], bytes]
    bare_encode: Callable[[Sequence[Trajectory]], bytes]
    """without the writer's checks"""
    decode: Callable[[bytes], object]


def make_group(members: int = 8, prompt: int = 128, completion: int = 512) -> list[Trajectory]:
    """A group of the size that limits are stated for."""
    rng = np.random.default_rng(0)
    group = GroupId("bench/p000017/e0/a0")
    base = Trajectory(
        trajectory_id=trajectory_id(group, 0),
        group_id=group,
        claim_id=claim_id(WorkerId("gen-0"), Incarnation("i1"), 17),
        prompt_id="countdown-17",
        task="countdown",
        attempt=0,
        index_in_group=0,
        group_size=members,
        worker_id=WorkerId("gen-0"),
        incarnation=Incarnation("i1"),
        prompt_token_ids=rng.integers(0, VOCABULARY, prompt, dtype=np.int32),
        token_ids=rng.integers(0, VOCABULARY, completion, dtype=np.int32),
        logprobs=-rng.random(completion, dtype=np.float32),
        loss_mask=np.ones(completion, dtype=np.bool_),
        segments=(Segment(version=3, length=completion, proof=7),),
        sampling=Sampling(max_tokens=completion),
        fingerprint=Fingerprint(tokenizer_digest="ab" * 32, dtype="float32", engine="hf", engine_version="5.1"),
        finish_reason="stop",
        reward=1.0,
        reward_parts={"format": 1.0},
        reward_function="countdown@1",
        requested_at_us=1_700_000_000_000_000,
        started_at_us=1_700_000_000_100_000,
        finished_at_us=1_700_000_000_200_000,
        published_at_us=1_700_000_000_300_000,
    )
    return [
        replace(
            base,
            trajectory_id=trajectory_id(group, index),
            index_in_group=index,
            token_ids=rng.integers(0, VOCABULARY, completion, dtype=np.int32),
            logprobs=-rng.random(completion, dtype=np.float32),
        )
        for index in range(members)
    ]


def _codec(
    name: str, encode: Callable[[Sequence[Trajectory]], bytes], decode: Callable[[bytes], Sequence[Sequence[Any]]]
) -> Codec:
    def checked_encode(rows: Sequence[Trajectory]) -> bytes:
        for t in rows:
            _check(t)
        return encode(rows)

    return Codec(name=name, encode=checked_encode, bare_encode=encode, decode=lambda value: _checked(decode(value)))


def codecs(rows: Sequence[Trajectory]) -> list[Codec]:
    """Ours first, then those that are installed."""
    headers = group_message_headers(rows, encode_group(rows), "bench")
    found = [
        Codec(
            name="arrow",
            encode=encode_group,
            bare_encode=lambda r: write_rows(TRAJECTORY, _arrays(r)),
            decode=lambda value: decode_group(value, headers, LIMITS),
        ),
        _codec("json", lambda r: json.dumps(_lists(r)).encode(), json.loads),
        _codec("pickle", lambda r: pickle.dumps(_arrays(r), protocol=5), pickle.loads),
        _codec("pickle of lists", lambda r: pickle.dumps(_named(r)), _unnamed),
    ]
    if cloudpickle is not None:
        found.append(_codec("cloudpickle", lambda r: bytes(cloudpickle.dumps(_arrays(r))), pickle.loads))
    if msgpack is not None:
        pack, unpack = msgpack.Packer().pack, msgpack.unpackb
        found.append(_codec("msgpack", lambda r: bytes(pack(_raw(r))), unpack))
    if msgspec is not None:
        typed, read = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_rows_type()).decode
        found.append(_codec("msgspec", lambda r: typed(_lists(r)), read))
    if orjson is not None:
        found.append(_codec("orjson", lambda r: bytes(orjson.dumps(_lists(r))), orjson.loads))
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Bytes, and the fastest CPU microseconds of each codec over interleaved rounds."""
    rows = make_group()
    candidates = codecs(rows)
    values = {codec.name: codec.encode(rows) for codec in candidates}
    best: dict[tuple[str, str], float] = {}

    def take(name: str, what: str, call: Callable[[], object]) -> None:
        best[name, what] = min(best.get((name, what), float("inf")), _cpu_us(call))

    raw = _arrays(rows)
    for _ in range(rounds):
        take("", "common", lambda: [_value_and_hash(row) for row in raw])
        for codec in candidates:
            take(codec.name, "encode", lambda c=codec: c.encode(rows))  # type: ignore[misc]
            take(codec.name, "bare_encode", lambda c=codec: c.bare_encode(rows))  # type: ignore[misc]
            take(codec.name, "decode", lambda c=codec: c.decode(values[c.name]))  # type: ignore[misc]
    return _figures(values, best)


def _figures(values: dict[str, bytes], best: dict[tuple[str, str], float]) -> dict[str, Any]:
    common = best["", "common"]
    figures: dict[str, Any] = {
        name: {
            "bytes": len(value),
            "zstd_bytes": len(pa.Codec("zstd", compression_level=1).compress(value, asbytes=True)),
            **{f"{what}_us": round(best[name, what], 1) for what in ("encode", "bare_encode", "decode")},
        }
        for name, value in values.items()
    }
    figures["common_us"] = round(common, 1)
    figures["bytes_to_json"] = round(len(values["arrow"]) / len(values["json"]), 3)
    figures["to_arrow"] = {
        name: {
            "encode": round(best[name, "encode"] / best["arrow", "encode"], 2),
            "decode": round(best[name, "decode"] / best["arrow", "decode"], 2),
            "bytes": round(len(value) / len(values["arrow"]), 2),
        }
        for name, value in values.items()
    }
    if "msgspec" in values:
        for what in ("encode", "bare_encode", "decode"):
            figures[f"{what}_to_msgspec"] = round(best["arrow", what] / best["msgspec", what], 3)
        bare = (best["arrow", "decode"] - common) / (best["msgspec", "decode"] - common)
        figures["bare_decode_to_msgspec"] = round(bare, 3)
    return figures


def _cpu_us(call: Callable[[], object], repeats: int = 20) -> float:
    start = time.process_time_ns()
    for _ in range(repeats):
        call()
    return (time.process_time_ns() - start) / repeats / 1000


def _arrays(rows: Sequence[Trajectory]) -> list[Any]:
    return [to_row(trajectory) for trajectory in rows]


def _lists(rows: Sequence[Trajectory]) -> list[Any]:
    return [(*row[:-4], *[array.tolist() for array in row[-4:]]) for row in _arrays(rows)]


def _named(rows: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Column name -> value, arrays as lists."""
    return [dict(zip(TRAJECTORY.names, row, strict=True)) for row in _lists(rows)]


def _unnamed(value: bytes) -> list[Any]:
    return [[row[name] for name in TRAJECTORY.names] for row in pickle.loads(value)]  # noqa: S301


def _raw(rows: Sequence[Trajectory]) -> list[Any]:
    """Arrays as their bytes."""
    return [(*row[:-4], *[array.tobytes() for array in row[-4:]]) for row in _arrays(rows)]


def _array(value: Any, dtype: Any) -> Any:
    """What a decoder gave for an array: a list, its bytes, or the array."""
    return np.frombuffer(value, dtype=dtype) if isinstance(value, bytes) else np.asarray(value, dtype=dtype)


def _checked(rows: Sequence[Sequence[Any]]) -> list[tuple[Trajectory, str]]:
    """What `decode_group` promises, for rows that came as lists: arrays, checks, hash."""
    checked = []
    for values in rows:
        plain = tuple([_tuples(value) for value in values[:-4]])
        arrays = [_array(value, dtype) for value, dtype in zip(values[-4:], _DTYPES, strict=True)]
        trajectory, row_hash = _value_and_hash((*plain, *arrays))
        _check(trajectory)
        checked.append((trajectory, row_hash))
    return checked


def _value_and_hash(row: Row) -> tuple[Trajectory, str]:
    trajectory = from_row(row, sampling_from_row(row[_SAMPLING]), fingerprint_from_row(row[_FINGERPRINT]))
    return trajectory, finish_row(_prefix(row[:GROUP_COLUMNS]), row[GROUP_COLUMNS:])


@functools.lru_cache(maxsize=4)
def _prefix(group_part: Row) -> bytes:
    return group_prefix(group_part)


def _check(t: Trajectory) -> None:
    clean = clean_tokens(t.prompt_token_ids, t.token_ids, t.logprobs, t.loss_mask, VOCABULARY)
    fault = row_fault(t, LIMITS, tokens_are_clean=clean)
    if fault is not None:
        raise ValueError(fault)


def _rows_type() -> Any:
    """The rows as a type, so that a typed decoder checks them as an Arrow schema does."""
    row = tuple([_python_type(column.type, column.nullable) for column in TRAJECTORY.columns])
    return list[tuple[row]]  # type: ignore[valid-type]


def _python_type(type_: pa.DataType, nullable: bool = False) -> Any:
    if nullable:
        return _python_type(type_) | None
    if pa.types.is_struct(type_):
        fields = tuple([_python_type(field.type) for field in type_])
        return tuple[fields]  # type: ignore[valid-type]
    if pa.types.is_map(type_) or pa.types.is_list(type_):
        item = _python_type(type_.field(0).type)
        return list[item]  # type: ignore[valid-type]
    if pa.types.is_floating(type_):
        return float
    if pa.types.is_boolean(type_):
        return bool
    return str if type_ == pa.utf8() else int


def _tuples(value: Any) -> Any:
    return tuple([_tuples(item) for item in value]) if isinstance(value, list | tuple) else value


def main() -> None:
    """Print one line a codec and the RESULT line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    for module in ("msgspec", "orjson", "msgpack", "cloudpickle"):
        if installed(module) is None:
            print(f"left out: {module} is not installed (make bench installs it)", file=sys.stderr)
    figures = measure(parser.parse_args().rounds)
    for name, figure in figures.items():
        print(f"{name:20} {figure}")
    print("RESULT " + json.dumps(figures))


if __name__ == "__main__":
    main()
