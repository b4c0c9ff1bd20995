"""What a service has written, as spans: request (trainer), generate (generator), step (trainer). A tap of its writer.

A step has a trace of its own and links to the traces of its groups: it belongs to all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from infra.logs import event
from infra.ports import Message
from infra.tracing import Attribute, Span
from schemas.errors import DriftlogError
from schemas.headers import TRACEPARENT, header_text, is_arrow
from schemas.ids import RunId
from schemas.ledger import Decision, StepCompleted, Subject, decode_ledger_control
from schemas.ledger_codec import decode_decisions
from schemas.prompt_codec import decode_request
from schemas.topics import TopicName
from schemas.trace_context import TraceContext, parse_traceparent, request_context
from schemas.trajectory_codec import decode_group
from schemas.trajectory_validate import TrajectoryLimits

log = logging.getLogger(__name__)

_ANY = TrajectoryLimits(vocabulary_size=2**31)
MAX_LINKS = 128
"""of a step; a backend keeps no more"""


class Spans:
    """Tell it of what was written; it emits spans."""

    def __init__(self, run: RunId, emit: Callable[[Span], None]) -> None:
        self._run = run
        self._emit = emit
        self._open: dict[str, TraceContext] = {}
        """group id -> its request, for groups that were open after the transaction before"""

    def written(self, messages: Sequence[Message]) -> None:
        """A transaction, or one record."""
        try:
            self._written(messages)
        except DriftlogError as error:
            event(log, "record_not_traced", level=logging.WARNING, reason=str(error))

    def _written(self, messages: Sequence[Message]) -> None:
        used: list[str] = []
        for message in messages:
            match message.topic.removeprefix(f"{self._run}."):
                case TopicName.PROMPTS:
                    self._request(message)
                case TopicName.TRAJECTORIES:
                    self._group(message)
                case TopicName.LEDGER if is_arrow(message.headers):
                    rows = decode_decisions(message.value, message.headers)
                    groups = [row for row in rows if row.subject is Subject.GROUP and row.group_id is not None]
                    used = [str(row.group_id) for row in groups if row.decision is Decision.TRAINED]
                case TopicName.LEDGER:
                    control = decode_ledger_control(message.value)
                    if isinstance(control, StepCompleted):
                        self._step(control, used)
                    groups_open = control.position.open_groups
                    self._open = {g.group_id: request_context(g.group_id, g.issued_at_us) for g in groups_open}

    def _request(self, message: Message) -> None:
        request = decode_request(message.value, message.headers)
        own = parse_traceparent(request.traceparent)
        if own is None:
            return
        at_us = request.issued_at_us
        attributes: dict[str, Attribute] = {
            "driftlog.group": request.group_id,
            "driftlog.intended_step": request.intended_step,
        }
        self._emit(Span(name="request", start_us=at_us, end_us=at_us, own=own, attributes=attributes))

    def _group(self, message: Message) -> None:
        parent = parse_traceparent(header_text(message.headers, TRACEPARENT))
        rows = [d.trajectory for d in decode_group(message.value, message.headers, _ANY)]
        good = [row for row in rows if row is not None]
        if parent is None or not good:
            return
        self._emit(
            Span(
                name="generate",
                start_us=min(row.started_at_us for row in good),
                end_us=max(row.published_at_us for row in good),
                parent=parent,
                attributes={"driftlog.group": good[0].group_id, "driftlog.rows": len(good)},
            )
        )

    def _step(self, step: StepCompleted, groups: Sequence[str]) -> None:
        links = [self._open[group] for group in groups if group in self._open][:MAX_LINKS]
        self._emit(
            Span(
                name="step",
                start_us=step.at_us - int(1e6 * (step.phase_s.get("batch", 0.0) + step.phase_s.get("train", 0.0))),
                end_us=step.at_us,
                links=links,
                attributes={"driftlog.policy_version": step.version_out, "driftlog.groups": step.groups},
            )
        )
