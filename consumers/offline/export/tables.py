"""The tables of an export but for the trajectories: their columns, and the rows that the log gives them.

docs/queries.md lists every column; a test compares that list with these schemas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from consumers.offline.export.index import GroupOutcome
from consumers.offline.outcomes import version_of
from consumers.offline.run_log import LedgerTransaction, PolicyEntry, RequestEntry
from consumers.offline.trajectory_batches import RefusedRow
from schemas.heartbeat import Heartbeat
from schemas.ledger import StepCompleted
from schemas.ledger_codec import DECISIONS
from schemas.prompt_codec import PROMPT
from schemas.trajectory import PromptRequest
from schemas.trajectory_schema import TIMESTAMP, map_to_row, sampling_to_row

Row = Sequence[Any]

_TEXTS = frozenset(("text", "prompt_text"))
_TOKENS = frozenset(
    ("prompt_token_ids", "token_ids", "logprobs", "loss_mask", "proximal_logprobs", "reference_logprobs")
)
_NUMBERS = pa.map_(pa.utf8(), pa.float64())


def without(schema: pa.Schema, *, tokens: bool, text: bool) -> pa.Schema:
    """The columns that are wanted."""
    dropped = (frozenset() if tokens else _TOKENS) | (frozenset() if text else _TEXTS)
    return pa.schema([field for field in schema if field.name not in dropped])


def _schema(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, type_) for name, type_ in fields])


TRANSACTION = _schema(("transaction", pa.int64()), ("ledger_offset", pa.int64()), ("version", pa.int64()))
DECISION_ROWS = pa.schema([*TRANSACTION, *[pa.field(c.name, c.type) for c in DECISIONS.columns]])
STEPS = _schema(
    ("version", pa.int64()), ("version_in", pa.int64()), ("completed_at", TIMESTAMP), ("transaction", pa.int64()),
    ("ledger_offset", pa.int64()), ("groups", pa.int64()), ("trajectories", pa.int64()), ("batch_digest", pa.utf8()),
    ("rng_digest", pa.utf8()), ("config_digest", pa.utf8()), ("code_revision", pa.utf8()),
    ("policy_read_up_to", pa.int64()), ("metrics_nonfinite", pa.list_(pa.utf8())), ("phase_s", _NUMBERS),
)  # fmt: skip
STEP_METRICS = _schema(
    ("version", pa.int64()), ("completed_at", TIMESTAMP), ("name", pa.utf8()), ("value", pa.float64())
)
POLICY = _schema(
    ("offset", pa.int64()), ("type", pa.utf8()), ("at", TIMESTAMP), ("version", pa.int64()), ("worker", pa.utf8()),
    ("incarnation", pa.utf8()), ("switch", pa.utf8()), ("counts", pa.bool_()), ("problem", pa.utf8()),
    ("phase_s", _NUMBERS), ("event", pa.utf8()),
)  # fmt: skip
REQUESTS = pa.schema(
    [*_schema(("partition", pa.int32()), ("offset", pa.int64())), *[pa.field(c.name, c.type) for c in PROMPT.columns]]
)
GROUPS = _schema(
    ("group_id", pa.utf8()), ("prompt_id", pa.utf8()), ("task", pa.utf8()), ("epoch", pa.int32()),
    ("attempt", pa.int32()), ("group_size", pa.int32()), ("request_position", pa.int64()),
    ("intended_step", pa.int64()), ("issued_at", TIMESTAMP), ("decision", pa.utf8()), ("reason", pa.utf8()),
    ("detail", pa.utf8()), ("decided_at", TIMESTAMP), ("trained_at_version", pa.int64()), ("rows", pa.int32()),
    ("reward_mean", pa.float64()), ("reward_std", pa.float64()), ("reward_min", pa.float64()),
    ("reward_max", pa.float64()),
)  # fmt: skip
WORKERS = _schema(
    ("worker", pa.utf8()), ("incarnation", pa.utf8()), ("at", TIMESTAMP), ("sequence", pa.int64()),
    ("state", pa.utf8()), ("version", pa.int64()), ("claims", pa.list_(pa.utf8())), ("tokens_total", pa.int64()),
    ("groups_total", pa.int64()), ("tokens_per_s", pa.float64()), ("idle_fraction", pa.float64()),
)  # fmt: skip
REFUSED = _schema(
    ("partition", pa.int32()), ("offset", pa.int64()), ("row", pa.int32()), ("code", pa.utf8()), ("detail", pa.utf8())
)


def decision_rows(transaction: LedgerTransaction) -> Iterator[Row]:
    """Every decision of a transaction."""
    place = (transaction.number, transaction.offset, version_of(transaction.control))
    for r in transaction.decisions:
        yield (
            *place, r.subject.value, r.group_id, r.trajectory_id, r.partition, r.offset, r.row, r.row_sha256,
            r.decision.value, r.reason, r.policy_lag, r.weight, r.use_count, r.reward, r.advantage,
            r.completion_tokens, r.consumed_at_us, r.detail,
        )  # fmt: skip


def step_row(transaction: LedgerTransaction, step: StepCompleted) -> Row:
    """One training step."""
    return (
        step.version_out, step.version_in, step.at_us, transaction.number, transaction.offset, step.groups,
        step.trajectories, step.batch_digest, step.rng_digest, step.config_digest, step.code_revision,
        step.policy_read_up_to, list(step.metrics_nonfinite), map_to_row(step.phase_s),
    )  # fmt: skip


def metric_rows(step: StepCompleted) -> Iterator[Row]:
    """Its metrics, one a row; those that were not finite are NaN."""
    for name, value in sorted(step.metrics.items()):
        yield step.version_out, step.at_us, name, value
    for name in step.metrics_nonfinite:
        yield step.version_out, step.at_us, name, math.nan


def policy_row(entry: PolicyEntry) -> Row:
    """One record of policy; unreadable ones too."""
    if entry.event is None:
        return entry.offset, None, None, None, None, None, None, False, entry.problem, (), None
    event: dict[str, Any] = entry.event.model_dump(mode="json")
    problem = entry.void.reason if entry.void is not None else "altered in the log" if entry.is_damaged else None
    return (
        entry.offset, event["type"], event["at_us"], event.get("version"), event.get("worker"),
        event.get("incarnation"), event.get("switch"), entry.is_legal, problem,
        map_to_row(event.get("phase_s") or {}), json.dumps(event, sort_keys=True),
    )  # fmt: skip


def request_row(entry: RequestEntry, request: PromptRequest, schema: pa.Schema) -> Row:
    """One request, with the columns that are wanted."""
    r = request
    values: dict[str, Any] = {
        "partition": entry.partition, "offset": entry.offset, "group_id": r.group_id,
        "request_position": r.request_position, "prompt_id": r.prompt_id, "task": r.task, "epoch": r.epoch,
        "attempt": r.attempt, "group_size": r.group_size, "prompt_token_ids": r.prompt_token_ids,
        "prompt_text": r.prompt_text, "reference": map_to_row(dict(r.reference)),
        "sampling": sampling_to_row(r.sampling), "intended_step": r.intended_step, "min_version": r.min_version,
        "fallback_version": r.fallback_version, "issued_at": r.issued_at_us,
    }  # fmt: skip
    return [values[name] for name in schema.names]


def group_row(request: PromptRequest | None, group_id: str, outcome: GroupOutcome) -> Row:
    """What was asked and what became of it; a request that is not in the log leaves its part empty."""
    r, o = request, outcome
    asked = (None,) * 8 if r is None else (
        r.prompt_id, r.task, r.epoch, r.attempt, r.group_size, r.request_position, r.intended_step, r.issued_at_us,
    )  # fmt: skip
    rewards: Row = (None,) * 4
    if o.rows:
        rewards = (o.mean, math.sqrt(o.squares / o.rows), o.least, o.most)
    return (
        group_id, *asked, o.decision, o.reason, o.detail, o.decided_at_us, o.version, o.rows, *rewards,
    )  # fmt: skip


def worker_rows(last: Mapping[tuple[str, str], Heartbeat]) -> Iterator[Row]:
    """The last heartbeat of each incarnation."""
    for _, b in sorted(last.items()):
        yield (
            b.worker, b.incarnation, b.at_us, b.sequence, b.state, b.version, list(b.claims), b.tokens_total,
            b.groups_total, b.tokens_per_s, b.idle_fraction,
        )  # fmt: skip


def refused_row(refused: RefusedRow) -> Row:
    """A row or record that fails validation."""
    return refused.partition, refused.offset, refused.row, refused.code, refused.detail
