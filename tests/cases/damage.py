"""Records as a broken or foreign writer would leave them."""

from __future__ import annotations

import io

import pyarrow as pa


def batch_of(value: bytes) -> pa.RecordBatch:
    """The one batch of a record."""
    with pa.ipc.open_stream(pa.BufferReader(value)) as reader:
        return reader.read_next_batch()


def stream_of(batch: pa.RecordBatch) -> bytes:
    """An Arrow stream of one batch."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def without_column(value: bytes, name: str) -> bytes:
    """The same record without one column: valid Arrow, and not a trajectory."""
    batch = batch_of(value)
    return stream_of(batch.select([column for column in batch.schema.names if column != name]))
