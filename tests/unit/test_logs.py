"""One event, one line, whatever is in its fields."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from infra import logs

LOGGER = logging.getLogger("tests.logs")


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, kafka_level = root.handlers[:], root.level, logging.getLogger("kafka").level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("kafka").setLevel(kafka_level)


def _written(json_lines: bool, name: str = "version_published", **fields: object) -> str:
    stream = io.StringIO()
    logs.configure("info", json=json_lines, stream=stream, service="trainer", run="demo")
    logs.event(LOGGER, name, **fields)
    return stream.getvalue()


def test_json_line_holds_name_context_and_fields() -> None:
    line = json.loads(_written(True, policy_version=3, loss=0.5, parent=None))

    assert line.pop("at").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "tests.logs",
        "event": "version_published",
        "service": "trainer",
        "run": "demo",
        "policy_version": 3,
        "loss": 0.5,
        "parent": None,
    }


def test_a_field_cannot_replace_the_event_name() -> None:
    assert json.loads(_written(True, event="forged"))["event"] == "version_published"


@pytest.mark.parametrize("json_lines", [True, False])
def test_a_value_with_line_breaks_stays_on_one_line(json_lines: bool) -> None:
    text = _written(json_lines, reason="first\nsecond\r\x1b[2J\u2028third")

    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "\x1b" not in text


def test_non_finite_numbers_are_valid_json() -> None:
    line = json.loads(_written(True, kl=float("nan"), ratio=float("inf")), parse_constant=pytest.fail)

    assert (line["kl"], line["ratio"]) == ("nan", "inf")


def test_words_are_quoted_in_the_plain_form() -> None:
    text = _written(False, reason="no worker left", loss=0.123456789)

    assert 'reason="no worker left" loss=0.123457' in text


def test_a_long_value_is_cut_with_its_length() -> None:
    assert json.loads(_written(True, blob="x" * 5_000))["blob"].endswith("...[5000 characters]")


def test_configuring_again_does_not_double_lines() -> None:
    logs.configure("info", json=False, stream=io.StringIO())

    assert _written(False).count("\n") == 1


def test_debug_of_the_kafka_client_is_never_switched_on() -> None:
    logs.configure("debug", json=False, stream=io.StringIO())

    assert not logging.getLogger("kafka.producer").isEnabledFor(logging.INFO)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        logs.configure("loud", json=False)


def test_exceptions_are_written_with_the_event() -> None:
    stream = io.StringIO()
    logs.configure("info", json=True, stream=stream)
    try:
        raise KeyError("gone")
    except KeyError:
        logs.event(LOGGER, "load_failed", level=logging.WARNING, exc_info=True)

    assert "KeyError: 'gone'" in json.loads(stream.getvalue())["exception"]
