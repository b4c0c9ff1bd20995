"""The trainer's log-probabilities beside a pass over the trajectories, which come in another order.

They are spooled to scratch files and mapped, so memory holds one entry an id and no token. Of several scores of
one trajectory (replays) the first is kept: it belongs to the step that trained it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from consumers.offline.run_log import RunLog, ScoresEntry
from schemas.topics import TopicName, topic
from schemas.trajectory_columns import flat_values, list_offsets, list_sums

COLUMNS = (
    pa.field("mean_log_ratio", pa.float64()),
    pa.field("max_abs_log_ratio", pa.float64()),
    pa.field("proximal_logprobs", pa.list_(pa.float32())),
    pa.field("reference_logprobs", pa.list_(pa.float32())),
)
_EMPTY = np.empty(0, dtype=np.float32)


class ScoreSpool:
    """First `add` every entry, then `freeze`, then `join` batch by batch; `close` removes the scratch files."""

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / ".proximal.f32", directory / ".reference.f32")
        self._files: list[BinaryIO] = [path.open("wb") for path in self._paths]
        self._places: dict[str, tuple[int, int, int]] = {}
        """trajectory id -> (tokens, start in proximal, start in reference or -1)"""
        self._ends = [0, 0]
        self._maps: list[npt.NDArray[np.float32]] = []

    def add(self, entry: ScoresEntry) -> None:
        """Spool one record."""
        for row in entry.rows:
            if row.trajectory_id in self._places:
                continue
            starts = [self._append(0, row.proximal), -1 if row.reference is None else self._append(1, row.reference)]
            self._places[row.trajectory_id] = (len(row.proximal), starts[0], starts[1])

    def freeze(self) -> None:
        """Every record is in."""
        for file in self._files:
            file.close()
        self._maps = [
            np.memmap(path, dtype=np.float32, mode="r") if end else _EMPTY
            for path, end in zip(self._paths, self._ends, strict=True)
        ]

    def close(self) -> None:
        """Remove the scratch files. Safe to call twice."""
        self._maps = []
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)

    def join(self, rows: pa.RecordBatch, trained: npt.NDArray[np.bool_]) -> list[pa.Array]:
        """COLUMNS for these rows; null where there are no scores of as many tokens, or the row was not trained.

        Scores name the trajectory, not the record: a duplicate that was dropped has the id of the one they are of."""
        ids = rows.column("trajectory_id").to_pylist()
        lengths = np.diff(list_offsets(rows.column("token_ids"))).tolist()
        places = [self._places.get(one) if is_trained else None for one, is_trained in zip(ids, trained, strict=True)]
        places = [p if p is not None and p[0] == length else None for p, length in zip(places, lengths, strict=True)]
        proximal = _lists([None if p is None else self._maps[0][p[1] : p[1] + p[0]] for p in places])
        reference = _lists([None if p is None or p[2] < 0 else self._maps[1][p[2] : p[2] + p[0]] for p in places])
        return [*_ratios(rows, proximal), proximal, reference]

    def _append(self, file: int, values: npt.NDArray[np.float32]) -> int:
        start = self._ends[file]
        self._files[file].write(np.asarray(values, dtype="<f4").tobytes())
        self._ends[file] = start + len(values)
        return start


def spool_scores(run_log: RunLog, directory: Path) -> tuple[ScoreSpool, list[str]]:
    """Everything the topic holds, and the records that cannot be read, in words."""
    name = topic(run_log.run, TopicName.SCORES)
    problems = []
    spool = ScoreSpool(directory)
    try:
        for entry in run_log.scores():
            if entry.problem:
                problems.append(f"{name}[{entry.partition}]@{entry.offset}: {entry.problem}")
            spool.add(entry)
        spool.freeze()
    except BaseException:
        spool.close()
        raise
    return spool, problems


def _lists(values: Sequence[npt.NDArray[np.float32] | None]) -> pa.Array:
    lengths = [0 if one is None else len(one) for one in values]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    flat = np.concatenate([_EMPTY, *[one for one in values if one is not None]])
    missing = np.array([one is None for one in values], dtype=np.bool_)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), mask=pa.array(missing))


def _ratios(rows: pa.RecordBatch, proximal: pa.Array) -> list[pa.Array]:
    """Mean and largest absolute log(trainer / generator) over the sampled tokens of each row that has scores."""
    scored = ~np.asarray(proximal.is_null().to_numpy(zero_copy_only=False))
    held = rows.filter(pa.array(scored))
    behaviour = held.column("logprobs")
    mask = flat_values(held.column("loss_mask"))
    log_ratio = np.where(mask, flat_values(proximal).astype(np.float64) - flat_values(behaviour), 0.0)
    offsets = list_offsets(behaviour)
    tokens = list_sums(mask, offsets)
    mean, largest = np.zeros(len(scored)), np.zeros(len(scored))
    if held.num_rows:
        # Rows have at least one token: no list is empty, which is what reduceat needs.
        mean[scored] = np.add.reduceat(log_ratio, offsets[:-1]) / np.maximum(tokens, 1)
        largest[scored] = np.maximum.reduceat(np.abs(log_ratio), offsets[:-1])
    return [pa.array(mean, mask=~scored), pa.array(largest, mask=~scored)]
