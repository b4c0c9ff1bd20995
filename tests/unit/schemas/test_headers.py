"""CloudEvents headers and the self-description of records."""

from __future__ import annotations

import pytest

from schemas.errors import InvalidRecord
from schemas.headers import (
    arrow_headers,
    control_headers,
    dead_letter_headers,
    event_headers,
    event_type,
    header_text,
    is_arrow,
    json_headers,
)
from schemas.policy_events import BranchStarted


def test_an_event_carries_the_cloudevents_headers_in_binary_mode() -> None:
    headers = event_headers(
        event_type="Settled",
        source="trainer",
        event_id="7",
        at_us=1_760_000_000_123_456,
        content_type="application/json",
        traceparent="00-ab-cd-01",
        extra=(("x", b"y"),),
    )

    assert headers == (
        ("ce_specversion", b"1.0"),
        ("ce_id", b"7"),
        ("ce_type", b"Settled"),
        ("ce_source", b"trainer"),
        ("ce_time", b"2025-10-09T08:53:20.123456Z"),
        ("content-type", b"application/json"),
        ("traceparent", b"00-ab-cd-01"),
        ("x", b"y"),
    )


def test_the_last_type_counts() -> None:
    assert event_type((("ce_type", b"A"), ("ce_type", b"B"))) == "B"


@pytest.mark.parametrize("headers", [(), (("ce_type", b""),)])
def test_a_record_without_a_type_is_refused(headers: tuple[tuple[str, bytes], ...]) -> None:
    with pytest.raises(InvalidRecord) as caught:
        event_type(headers)

    assert caught.value.code == "no_type"


def test_a_header_that_is_not_text_is_refused_by_name() -> None:
    with pytest.raises(InvalidRecord) as caught:
        event_type((("ce_type", b"\xff"),))

    assert caught.value.code == "bad_header:ce_type"


def test_arrow_headers_describe_the_value() -> None:
    assert arrow_headers("trajectory", "1.0", 8, b"abc") == (
        ("arrow-schema", b"trajectory/1.0"),
        ("row-count", b"8"),
        ("payload-bytes", b"3"),
    )


def test_arrow_and_json_records_of_one_topic_are_told_apart() -> None:
    assert is_arrow((("content-type", b"application/vnd.apache.arrow.stream"),))
    assert not is_arrow((("content-type", b"application/json"),))
    assert not is_arrow(())


def test_the_same_json_event_written_again_has_the_same_id() -> None:
    first, again, other = [
        header_text(json_headers(event_type="A", source="s", value=value, at_us=1), "ce_id")
        for value in (b"{}", b"{}", b"[]")
    ]

    assert first == again != other


def test_a_control_event_names_itself() -> None:
    event = BranchStarted(run="demo", at_us=5, from_version=3)

    headers = control_headers(event, event.model_dump_json().encode(), "trainer")

    assert event_type(headers) == "BranchStarted"
    assert header_text(headers, "ce_time") == "1970-01-01T00:00:00.000005Z"


def test_a_dead_letter_keeps_its_headers_and_says_where_and_why() -> None:
    headers = dead_letter_headers(
        (("a", b"1"),), topic="t", partition=3, offset=22, error=InvalidRecord("truncated", "x" * 5_000)
    )

    assert headers[0] == ("a", b"1")
    assert [header_text(headers, f"dead-{name}") for name in ("topic", "partition", "offset", "code")] == [
        "t",
        "3",
        "22",
        "truncated",
    ]
    assert len(header_text(headers, "dead-message") or "") == 2_000
