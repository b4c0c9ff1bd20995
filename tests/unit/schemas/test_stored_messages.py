"""Messages that earlier builds wrote still decode, and everything the registry names has one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from schemas import events_doc
from schemas.events_doc import ARROW_PAYLOADS, EXAMPLES, JSON_PAYLOADS, event_name
from schemas.headers import CE_TYPE, header_text
from schemas.topics import TOPICS
from schemas.trajectory_codec import decode_group
from schemas.trajectory_schema import TRAJECTORY
from tests.unit.schemas.make_examples import LIMITS, Example, examples, headers_path, read_headers, same

ALL = examples()
BY_PATH = {example.path: example for example in ALL}


@pytest.mark.parametrize("example", ALL, ids=list(BY_PATH))
def test_a_stored_message_decodes_to_the_values_it_was_made_of(example: Example) -> None:
    stored = (EXAMPLES / example.path).read_bytes()

    assert same(example.decode(stored, read_headers(example.path)), example.expected)


@pytest.mark.parametrize("example", [e for e in ALL if e.path.endswith(".json")], ids=lambda e: e.path)
def test_json_is_still_written_as_it_was(example: Example) -> None:
    assert (EXAMPLES / example.path).read_bytes() == example.value, "a change needs a new version of the event"


@pytest.mark.parametrize("example", [e for e in ALL if e.headers is not None], ids=lambda e: e.path)
def test_headers_are_still_written_as_they_were(example: Example) -> None:
    # Only the size of the value may move: another Arrow library pads differently.
    def stable(headers: tuple[tuple[str, bytes], ...]) -> list[tuple[str, bytes]]:
        return [pair for pair in headers if pair[0] not in ("payload-bytes", "ce_id")]

    assert stable(read_headers(example.path)) == stable(example.headers or ())


@pytest.mark.parametrize("topic", ARROW_PAYLOADS)
def test_columns_do_not_change_without_a_new_version(topic: str) -> None:
    fmt = ARROW_PAYLOADS[topic]  # type: ignore[index]
    stored = (EXAMPLES / topic / f"{fmt.event_type}-{fmt.version}.arrow").read_bytes()

    assert _text(fmt.schema) == _text(pa.ipc.open_stream(stored).schema)


def test_row_hashes_do_not_change_without_a_new_tag() -> None:
    path = f"trajectories/{TRAJECTORY.event_type}-1.0.arrow"
    rows = decode_group((EXAMPLES / path).read_bytes(), read_headers(path), LIMITS)

    assert [row.row_sha256 for row in rows] == [
        "add49337949f274c62cfd635dd0393f87b2007241980eb2ddfcf1bf07e1aaaad",
        "768d16a684df0dbd423fd63a7feab3237b2f74baa79cfff89b2335ada697eea0",
        "118cd59bff0e8788fe8d78e0127e777a859af9d152623773870db8b09ca56e52",
    ]


def test_every_topic_has_a_stored_message() -> None:
    assert {topic.value for topic in TOPICS} <= {path.partition("/")[0] for path in BY_PATH}


def test_every_event_class_and_arrow_format_has_a_stored_message() -> None:
    wanted = {f"{topic.value}/{event_name(m)}-1.json" for topic, models in JSON_PAYLOADS.items() for m in models}
    wanted |= {f"{topic.value}/{f.event_type}-{f.version}.arrow" for topic, f in ARROW_PAYLOADS.items()}

    assert wanted <= set(BY_PATH)


def test_no_stored_file_is_unreferenced() -> None:
    known = set(BY_PATH) | {headers_path(path) for path in BY_PATH}

    assert {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*") if file.is_file()} <= known


def test_stored_headers_name_the_event() -> None:
    for example in ALL:
        if example.headers is not None and not example.path.startswith("deadletters"):
            assert header_text(read_headers(example.path), CE_TYPE) == Path(example.path).name.partition("-")[0]


def test_the_events_page_is_what_the_registry_says() -> None:
    page = Path(events_doc.__file__).parent.parent / "docs" / "events.md"

    assert page.read_text() == events_doc.render(), "write it again: schemas.events_doc.render()"


def _text(schema: pa.Schema) -> list[tuple[str, str, bool]]:
    return [(field.name, str(field.type), field.nullable) for field in schema]
