"""W3C trace context of a prompt request: made from the request itself, read from the header `traceparent`.

Guarantees: the same request has the same trace wherever it is computed, also by a trainer that was restarted; two
runs of one name have different ones, because the time of issue is in it. A header that is no traceparent is none.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """One span of one trace, in hex digits.

    >>> str(parse_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'
    """

    trace_id: str
    """32 digits"""
    span_id: str
    """16 digits"""

    def __str__(self) -> str:
        """The header."""
        return f"00-{self.trace_id}-{self.span_id}-01"


def request_context(group_id: str, issued_at_us: int) -> TraceContext:
    """The span of a request: everything that becomes of it belongs to this trace."""
    digits = hashlib.sha256(f"request {group_id} {issued_at_us}".encode()).hexdigest()
    return TraceContext(trace_id=digits[:32], span_id=digits[32:48])


def parse_traceparent(text: str | None) -> TraceContext | None:
    """What a header says; None when there is none, or it is not one (the standard asks to go on without)."""
    found = _TRACEPARENT.fullmatch(text or "")
    if found is None or (found[4] and text is not None and text.startswith("00")):
        return None
    if set(found[1]) == {"0"} or set(found[2]) == {"0"}:
        return None
    return TraceContext(trace_id=found[1], span_id=found[2])


def trace_id_of(text: str | None) -> str | None:
    """The trace of a header, for log lines."""
    context = parse_traceparent(text)
    return None if context is None else context.trace_id
