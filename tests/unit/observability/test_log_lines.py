"""Log lines speak one language: events with fields, and one name for each thing they speak of."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import tree_rules as rules

ROOT = Path(__file__).resolve().parents[3]
# One name a thing: a search for a version or a group finds every line of every service.
OTHER_WORDS = {
    "version": "policy_version", "version_id": "policy_version", "group_id": "group", "run_id": "run",
    "worker_id": "worker", "trace_id": "trace", "traceparent": "trace",
    "place": "topic, partition and offset", "position": "topic, partition and offset",
}  # fmt: skip
LOGGERS = {"log", "_LOG", "logger", "_log"}
DIRECT = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def calls(source: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


def faults(source: str) -> list[str]:
    found = []
    for call in calls(source):
        function = call.func
        if isinstance(function, ast.Name) and function.id == "event":
            found += [
                f"line {call.lineno}: say {OTHER_WORDS[keyword.arg]}, not {keyword.arg}"
                for keyword in call.keywords
                if keyword.arg in OTHER_WORDS
            ]
            given = {keyword.arg for keyword in call.keywords}
            if "offset" in given and not {"topic", "partition"} <= given:
                found.append(f"line {call.lineno}: an offset is a place only with its topic and partition")
        if (
            isinstance(function, ast.Attribute)
            and function.attr in DIRECT
            and isinstance(function.value, ast.Name)
            and function.value.id in LOGGERS
        ):
            found.append(f"line {call.lineno}: write an event with fields, not a sentence")
    return found


def test_every_line_is_an_event_and_names_things_by_one_word() -> None:
    wrong = {}
    for path in rules.python_files(ROOT, rules.PACKAGES):
        if path != ROOT / "infra" / "logs.py":
            found = faults(path.read_text())
            if found:
                wrong[str(path.relative_to(ROOT))] = found

    assert wrong == {}


def test_the_check_notices_a_sentence_and_another_word() -> None:
    assert faults('log.warning("lost %s", name)') == ["line 1: write an event with fields, not a sentence"]
    assert faults('event(log, "x", group_id=1)') == ["line 1: say group, not group_id"]
    assert faults('event(log, "x", group=1)') == []


def test_the_check_notices_half_a_place() -> None:
    alone = ["line 1: an offset is a place only with its topic and partition"]
    assert faults('event(log, "x", offset=1)') == alone
    assert faults('event(log, "x", partition=0, offset=1)') == alone
    assert faults('event(log, "x", topic="t", offset=1)') == alone
    assert faults('event(log, "x", topic="t", partition=0, offset=1)') == []
    assert faults('event(log, "x", place="t[0]")') == ["line 1: say topic, partition and offset, not place"]
