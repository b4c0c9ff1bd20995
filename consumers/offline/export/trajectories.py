"""The table `trajectories` of an export: one row a trajectory, its decision and the trainer's scores joined.

Partitioned by the version that sampled the oldest token. Columns stay columns from the log to the file.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from consumers.offline.export.index import JOINED, DecisionIndex
from consumers.offline.export.parquet import PartitionedTable
from consumers.offline.export.scores import COLUMNS as SCORE_COLUMNS
from consumers.offline.export.scores import ScoreSpool
from consumers.offline.export.tables import without
from consumers.offline.trajectory_batches import ROWS, places_of
from schemas.ledger import Decision
from schemas.trajectory_columns import flat_values, list_offsets, list_sums

PARTITION_KEY = "version"
_DERIVED = (
    pa.field("prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    pa.field("sampled_tokens", pa.int32()),
    pa.field("newest_version", pa.int64()),
)
TRAJECTORIES = pa.schema([*ROWS, *_DERIVED, *JOINED, *SCORE_COLUMNS])
"""every column but `version`, which is in the path"""


class TrajectoriesTable:
    """Add batches of ROWS in any order."""

    def __init__(self, root: Path, index: DecisionIndex, scores: ScoreSpool, *, tokens: bool, text: bool) -> None:
        self.schema = without(TRAJECTORIES, tokens=tokens, text=text)
        self.undecided: Counter[str] = Counter()
        """rows without a decision, by why"""
        self._index = index
        self._scores = scores
        self._files = PartitionedTable(root, PARTITION_KEY, self.schema)

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self._files.rows

    @property
    def files(self) -> int:
        """Files so far."""
        return self._files.files

    def add(self, rows: pa.RecordBatch) -> None:
        """Join one batch and hand it to its partitions."""
        if not rows.num_rows:
            return
        joined, missing = self._index.join(*places_of(rows))
        self.undecided.update(missing)
        oldest, derived = _derived(rows)
        trained = pc.equal(joined[0], Decision.TRAINED.value).to_numpy(zero_copy_only=False)
        columns = [*rows.columns, *derived, *joined, *self._scores.join(rows, trained)]
        batch = pa.RecordBatch.from_arrays(columns, schema=TRAJECTORIES).select(self.schema.names)
        versions = np.unique(oldest)
        for version in versions.tolist():
            part = batch if len(versions) == 1 else batch.filter(pa.array(oldest == version))
            self._files.add(version, part)

    def close(self) -> None:
        """End every file."""
        self._files.close()


def _derived(rows: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], list[pa.Array]]:
    """The oldest version of each row, and the columns of _DERIVED."""
    segments = rows.column("segments")
    starts = list_offsets(segments)[:-1]  # A valid row has at least one segment, which is what reduceat needs.
    versions = segments.flatten().field("version").to_numpy()
    oldest, newest = np.minimum.reduceat(versions, starts), np.maximum.reduceat(versions, starts)
    prompt, completion = [np.diff(list_offsets(rows.column(name))) for name in ("prompt_token_ids", "token_ids")]
    mask = rows.column("loss_mask")
    sampled = list_sums(flat_values(mask), list_offsets(mask))
    counts = [pa.array(values.astype(np.int32)) for values in (prompt, completion, sampled)]
    return oldest, [*counts, pa.array(newest)]
