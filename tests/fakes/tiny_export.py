"""What exports need of a TinyRun beyond what it holds: scores, and trajectories that look at every corner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from infra.ports import Message
from schemas.arrow_stream import write_rows
from schemas.ids import GroupId
from schemas.ledger import Decision, StepCompleted
from schemas.scores_codec import ScoreRow, encode_scores, scores_headers
from schemas.topics import TopicName, topic
from schemas.trajectory import Trajectory
from schemas.trajectory_schema import TRAJECTORY, to_row
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN

PROXIMAL = (-0.25, -0.25, -0.875)
"""behaviour is -0.5, -0.25, -1.0: log ratios 0.25, 0, 0.125"""


def add_scores(run: TinyRun, *, version: int, proximal: Sequence[float] = PROXIMAL) -> list[str]:
    """The trainer's scores of everything that was trained into a version; the trajectory ids."""
    ids: list[str] = []
    for transaction in run.run_log().transactions():
        step = transaction.control
        if isinstance(step, StepCompleted) and step.version_out == version:
            ids += [
                r.trajectory_id for r in transaction.decisions if r.trajectory_id and r.decision is Decision.TRAINED
            ]
    for group in sorted({one.rpartition("/")[0] for one in ids}):
        append_scores(run, group, [one for one in ids if one.startswith(f"{group}/")], version - 1, proximal)
    return ids


def append_scores(run: TinyRun, group: str, ids: Sequence[str], version_in: int, proximal: Sequence[float]) -> None:
    """One scores record."""
    values = np.array(proximal, dtype=np.float32)
    rows = [ScoreRow(trajectory_id=one, version_in=version_in, proximal=values, reference=values - 1) for one in ids]
    value = encode_scores(rows)
    headers = scores_headers(rows, value, "trainer", 1)
    run.log.append(Message(topic=topic(RUN, TopicName.SCORES), key=group.encode(), value=value, headers=headers))


def append_raw_rows(
    run: TinyRun, rows: Sequence[Trajectory], edit: Callable[[int, dict[str, Any]], None]
) -> tuple[int, int]:
    """A record as no honest writer makes it: `edit` changes the columns of each row. (partition, offset)"""
    raw = []
    for number, trajectory in enumerate(rows):
        columns = dict(zip(TRAJECTORY.names, to_row(trajectory), strict=True))
        edit(number, columns)
        raw.append(tuple(columns[name] for name in TRAJECTORY.names))
    value = write_rows(TRAJECTORY, raw)
    headers = TRAJECTORY.headers(rows=len(raw), value=value, source="odd", at_us=1, event_id=f"odd-{rows[0].group_id}")
    key = GroupId(rows[0].group_id).encode()
    placed = run.log.append(Message(topic=topic(RUN, TopicName.TRAJECTORIES), key=key, value=value, headers=headers))
    return placed.partition, placed.offset
