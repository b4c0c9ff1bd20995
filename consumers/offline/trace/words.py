"""What all traces share: the value they return, and how stamps, requests and proofs are put into words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from consumers.offline.run_log import PolicyEntry, RequestEntry
from schemas.headers import rfc3339
from schemas.policy_events import VersionLoaded
from schemas.trace_context import trace_id_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One life, as plain values and in words."""

    kind: Literal["trajectory", "group", "prompt", "version", "worker"]
    subject: str
    facts: Mapping[str, Any]
    lines: tuple[str, ...]

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({"kind": self.kind, "subject": self.subject, **self.facts}, indent=2)

    def text(self) -> str:
        """For a person."""
        return "\n".join([f"{self.kind} {self.subject}", *(f"  {line}" for line in self.lines)])


def when(at_us: int) -> str:
    """A stamp for people: to the millisecond, UTC."""
    return rfc3339(at_us)[:-4] + "Z"


def seconds(us: int) -> str:
    """A duration for people."""
    return f"{us / 1e6:.3f} s"


def facts_of_request(entry: RequestEntry | None) -> dict[str, Any] | None:
    """A request as plain values."""
    if entry is None or entry.request is None:
        return None
    r = entry.request
    return {
        "position": r.request_position,
        "partition": entry.partition,
        "offset": entry.offset,
        "prompt_id": r.prompt_id,
        "task": r.task,
        "attempt": r.attempt,
        "group_size": r.group_size,
        "intended_step": r.intended_step,
        "min_version": r.min_version,
        "issued_at_us": r.issued_at_us,
        "prompt_text": r.prompt_text,
        "trace": trace_id_of(r.traceparent),
    }


def request_lines(entry: RequestEntry | None) -> list[str]:
    """A request in words."""
    if entry is None or entry.request is None:
        return ["its request is not in the log"]
    r = entry.request
    place = f"request {r.request_position} at prompts[{entry.partition}]@{entry.offset}"
    what = (
        f"prompt {r.prompt_id}, attempt {r.attempt}, meant for step {r.intended_step}, from version {r.min_version} on"
    )
    trace = trace_id_of(r.traceparent)
    return [f"requested {when(r.issued_at_us)}: {place}, {what}", *([f"  trace {trace}"] if trace else [])]


def proof_facts(offset: int, entry: PolicyEntry | None) -> dict[str, Any]:
    """A proof as plain values, with words."""
    facts: dict[str, Any] = {"policy_offset": offset, "is_legal": False}
    if entry is None or not isinstance(entry.event, VersionLoaded):
        return facts | {"words": f"policy@{offset} is no proof"}
    event = entry.event
    void = "" if entry.void is None else f", VOID: {entry.void.reason}"
    old = "none" if event.probe_diff_old is None else f"{event.probe_diff_old:.2g}"
    return facts | {
        "is_legal": entry.is_legal,
        "worker": event.worker,
        "incarnation": event.incarnation,
        "version": event.version,
        "at_us": event.at_us,
        "probe_diff_new": event.probe_diff_new,
        "probe_diff_old": event.probe_diff_old,
        "weak": event.weak,
        "words": f"proof policy@{offset} {when(event.at_us)}, probe differs {event.probe_diff_new:.2g} from new, "
        f"{old} from old weights{void}",
    }
