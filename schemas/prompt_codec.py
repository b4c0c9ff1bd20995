"""PromptRequested records: one row a record, because each request goes to its own partition.

The trace context travels in the header alone. Requests come from the trainer's transactions, yet a worker
checks them like any other bytes of the log.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from schemas.arrow_columns import read_complete_rows
from schemas.arrow_stream import Column, Format, Row, read_batch, write_rows
from schemas.errors import InvalidRecord
from schemas.headers import TRACEPARENT, Headers, header_text
from schemas.ids import GroupId, parse_group_id
from schemas.trajectory import PromptRequest
from schemas.trajectory_schema import (
    SAMPLING,
    TEXT_MAP,
    TIMESTAMP,
    map_to_row,
    sampling_from_row,
    sampling_to_row,
)
from schemas.trajectory_validate import MAX_ID_LENGTH, Fault, sampling_fault

PROMPT = Format(
    "prompt",
    1,
    0,
    "PromptRequested",
    (
        Column(name="group_id", type=pa.utf8(), doc="run/p<prompt>/e<epoch>/a<attempt>"),
        Column(name="request_position", type=pa.int64(), doc="0, 1, 2, ... over the run; partition is position mod 16"),
        Column(name="prompt_id", type=pa.utf8(), doc="id in the prompt source"),
        Column(name="task", type=pa.utf8(), doc="for mixtures and metrics by task"),
        Column(name="epoch", type=pa.int32(), doc="pass over the prompt source"),
        Column(name="attempt", type=pa.int32(), doc="0 for the first request of this prompt, +1 for each one after"),
        Column(name="group_size", type=pa.int32(), doc="completions asked for"),
        Column(name="prompt_token_ids", type=pa.list_(pa.int32()), doc="[P] the prompt as the engine must see it"),
        Column(name="prompt_text", type=pa.utf8(), doc="for people only", nullable=True),
        Column(name="reference", type=TEXT_MAP, doc="what the reward function needs"),
        Column(name="sampling", type=SAMPLING, doc="how to sample"),
        Column(name="intended_step", type=pa.int64(), doc="depth of the version this group is meant to update"),
        Column(name="min_version", type=pa.int64(), doc="a worker waits for this version before it takes the request"),
        Column(name="fallback_version", type=pa.int64(), doc="after a short wait this version is enough"),
        Column(name="issued_at", type=TIMESTAMP, doc="trainer clock"),
    ),
)


def encode_request(request: PromptRequest) -> bytes:
    """The value of one record. InvalidRecord for anything a reader would refuse."""
    ids = request.prompt_token_ids
    if type(ids) is not np.ndarray or ids.dtype != np.int32 or ids.ndim != 1:
        raise InvalidRecord("schema_type:prompt_token_ids", f"{request.group_id}: need a 1-d int32 array")
    _refuse(_request_fault(request))
    return write_rows(PROMPT, [_to_row(request)])


def request_headers(request: PromptRequest, value: bytes, source: str) -> Headers:
    """Headers of the record with this value."""
    return PROMPT.headers(
        rows=1,
        value=value,
        source=source,
        at_us=request.issued_at_us,
        event_id=f"{request.group_id}:{request.request_position}",
        traceparent=request.traceparent,
    )


def decode_request(value: bytes | None, headers: Headers) -> PromptRequest:
    """Read one request; InvalidRecord says what is wrong."""
    rows = read_complete_rows(PROMPT, read_batch(PROMPT, value, headers))
    if len(rows) > 1:
        raise InvalidRecord("several_rows", f"a prompt record holds one request, not {len(rows)}")
    request = _from_row(rows[0], header_text(headers, TRACEPARENT))
    _refuse(_request_fault(request))
    if len(request.reference) != len(rows[0][9]):
        raise InvalidRecord("duplicate_key:reference", "column reference has the same key twice")
    return request


def _to_row(r: PromptRequest) -> Row:
    return (
        r.group_id, r.request_position, r.prompt_id, r.task, r.epoch, r.attempt, r.group_size, r.prompt_token_ids,
        r.prompt_text, map_to_row(r.reference), sampling_to_row(r.sampling), r.intended_step, r.min_version,
        r.fallback_version, r.issued_at_us,
    )  # fmt: skip


def _from_row(row: Row, traceparent: str | None) -> PromptRequest:
    return PromptRequest(
        group_id=GroupId(row[0]),
        request_position=row[1],
        prompt_id=row[2],
        task=row[3],
        epoch=row[4],
        attempt=row[5],
        group_size=row[6],
        prompt_token_ids=row[7],
        prompt_text=row[8],
        reference=dict(row[9]),
        sampling=sampling_from_row(row[10]),
        intended_step=row[11],
        min_version=row[12],
        fallback_version=row[13],
        issued_at_us=row[14],
        traceparent=traceparent,
    )


def _refuse(fault: Fault | None) -> None:
    if fault is not None:
        raise InvalidRecord(*fault)


def _request_fault(r: PromptRequest) -> Fault | None:
    try:
        key = parse_group_id(r.group_id)
    except ValueError as error:
        return "bad_ids", str(error)[:200]
    if (key.epoch, key.attempt) != (r.epoch, r.attempt):
        return "bad_ids", f"epoch {r.epoch}, attempt {r.attempt}, but the group id is {r.group_id}"
    if not (0 < len(r.prompt_id) <= MAX_ID_LENGTH and 0 < len(r.task) <= MAX_ID_LENGTH):
        return "bad_ids", f"prompt_id and task have 1 to {MAX_ID_LENGTH} characters"
    if r.group_size < 1:
        return "bad_group_size", f"group_size is {r.group_size}"
    if min(r.request_position, r.intended_step, r.min_version, r.fallback_version) < 0:
        return "bad_position", "request_position, intended_step, min_version and fallback_version are >= 0"
    if len(r.prompt_token_ids) == 0:
        return "no_prompt_tokens", "the prompt has no token"
    if r.prompt_token_ids.min() < 0:
        return "token_out_of_vocabulary", f"prompt token {int(r.prompt_token_ids.argmin())} is negative"
    return sampling_fault(r.sampling)
