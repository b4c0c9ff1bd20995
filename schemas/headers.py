"""Record headers: CloudEvents 1.0 binary mode, and the self-description of Arrow records.

Writers add them with the functions below; readers take `event_type` to choose a decoder, and the Arrow
reader compares `arrow-schema`, `row-count` and `payload-bytes` with what it finds in the value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from schemas.errors import InvalidRecord
from schemas.ledger import AnyLedgerControl
from schemas.policy_events import AnyPolicyEvent
from schemas.topics import ARROW_STREAM, JSON

Headers = tuple[tuple[str, bytes], ...]

CE_SPECVERSION = "ce_specversion"
CE_ID = "ce_id"
CE_TYPE = "ce_type"
CE_SOURCE = "ce_source"
CE_TIME = "ce_time"
CONTENT_TYPE = "content-type"
TRACEPARENT = "traceparent"
ARROW_SCHEMA = "arrow-schema"
ROW_COUNT = "row-count"
PAYLOAD_BYTES = "payload-bytes"
DEAD_TOPIC = "dead-topic"
DEAD_PARTITION = "dead-partition"
DEAD_OFFSET = "dead-offset"
DEAD_CODE = "dead-code"
DEAD_MESSAGE = "dead-message"

HEADER_DOCS: tuple[tuple[str, str], ...] = (
    (CE_SPECVERSION, "CloudEvents version, always `1.0`"),
    (CE_ID, "unique together with `ce_source`; the same event written again has the same id"),
    (CE_TYPE, "the event's name: decides how the value is decoded"),
    (CE_SOURCE, "who wrote it: service, and incarnation where there are several"),
    (CE_TIME, "producer clock, RFC 3339, UTC, microseconds"),
    (CONTENT_TYPE, f"`{ARROW_STREAM}` or `{JSON}`"),
    (TRACEPARENT, "W3C trace context (optional)"),
    (ARROW_SCHEMA, "Arrow records: `<name>/<major>.<minor>`, checked before the value is parsed"),
    (ROW_COUNT, "Arrow records: rows in the value, checked"),
    (PAYLOAD_BYTES, "Arrow records: length of the value, checked"),
    (DEAD_TOPIC, "dead letters: topic the record was read from"),
    (DEAD_PARTITION, "dead letters: its partition"),
    (DEAD_OFFSET, "dead letters: its offset"),
    (DEAD_CODE, "dead letters: reason code, as in the ledger after `invalid:`"),
    (DEAD_MESSAGE, "dead letters: the reason in words"),
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DEAD_MESSAGE_BYTES = 2_000  # A header is for people; the whole value follows in the same record anyway.


def event_headers(
    *,
    event_type: str,
    source: str,
    event_id: str,
    at_us: int,
    content_type: str,
    traceparent: str | None = None,
    extra: Sequence[tuple[str, bytes]] = (),
) -> Headers:
    """CloudEvents headers of one record; `extra` comes after them.

    >>> dict(event_headers(event_type="Settled", source="trainer", event_id="7", at_us=1_500_000,
    ...                    content_type="application/json"))["ce_time"]
    b'1970-01-01T00:00:01.500000Z'
    """
    headers = [
        (CE_SPECVERSION, b"1.0"),
        (CE_ID, event_id.encode()),
        (CE_TYPE, event_type.encode()),
        (CE_SOURCE, source.encode()),
        (CE_TIME, rfc3339(at_us).encode()),
        (CONTENT_TYPE, content_type.encode()),
    ]
    if traceparent is not None:
        headers.append((TRACEPARENT, traceparent.encode()))
    return (*headers, *extra)


def rfc3339(at_us: int) -> str:
    """Microseconds since 1970 as RFC 3339 text in UTC."""
    moment = _EPOCH + timedelta(microseconds=at_us)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def header(headers: Headers, name: str) -> bytes | None:
    """The last header of that name, or None."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


def header_text(headers: Headers, name: str) -> str | None:
    """The last header of that name as text, or None; InvalidRecord("bad_header:<name>") when it is not UTF-8."""
    value = header(headers, name)
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"bad_header:{name}", f"header {name} is not UTF-8 text: {value[:40]!r}") from error


def event_type(headers: Headers) -> str:
    """The last ce_type; InvalidRecord("no_type") when there is none."""
    name = header_text(headers, CE_TYPE)
    if not name:
        raise InvalidRecord("no_type", f"the record has no header {CE_TYPE}: nothing says how to decode it")
    return name


def is_arrow(headers: Headers) -> bool:
    """The value is an Arrow stream (on topics that hold Arrow and JSON records)."""
    return header(headers, CONTENT_TYPE) == ARROW_STREAM.encode()


def arrow_headers(name: str, version: str, rows: int, value: bytes) -> Headers:
    """What an Arrow record says of itself.

    >>> arrow_headers("trajectory", "1.0", 8, b"abc")[0]
    ('arrow-schema', b'trajectory/1.0')
    """
    return (
        (ARROW_SCHEMA, f"{name}/{version}".encode()),
        (ROW_COUNT, str(rows).encode()),
        (PAYLOAD_BYTES, str(len(value)).encode()),
    )


def json_headers(*, event_type: str, source: str, value: bytes, at_us: int, traceparent: str | None = None) -> Headers:
    """Headers of a JSON record. The id is taken from the bytes, so that writing it again repeats the id."""
    return event_headers(
        event_type=event_type,
        source=source,
        event_id=hashlib.sha256(value).hexdigest()[:32],
        at_us=at_us,
        content_type=JSON,
        traceparent=traceparent,
    )


def control_headers(event: AnyPolicyEvent | AnyLedgerControl, value: bytes, source: str) -> Headers:
    """Headers of a policy event or a ledger control record."""
    return json_headers(event_type=event.type, source=source, value=value, at_us=event.at_us)


def dead_letter_headers(original: Headers, *, topic: str, partition: int, offset: int, error: InvalidRecord) -> Headers:
    """The original headers followed by where the record was read and why it cannot be used."""
    return (
        *original,
        (DEAD_TOPIC, topic.encode()),
        (DEAD_PARTITION, str(partition).encode()),
        (DEAD_OFFSET, str(offset).encode()),
        (DEAD_CODE, error.code.encode(errors="replace")),
        (DEAD_MESSAGE, error.message.encode(errors="replace")[:_DEAD_MESSAGE_BYTES]),
    )
