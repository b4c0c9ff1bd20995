"""Logs are events: a constant name plus fields, one line each, on stderr.

`event` writes one; `configure` is called by a command's `main` and by nothing else (importing does nothing).
What goes into a field is the caller's choice: never token text, prompt text or a secret at INFO.
"""

from __future__ import annotations

import json as json_module
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

Field = str | int | float | bool | None
_FIELDS_ATTRIBUTE = "driftlog_fields"
# A field is for reading in a line; whole payloads belong into the log they came from.
MAX_FIELD_CHARS = 2_000


def event(
    logger: logging.Logger, name: str, *, level: int = logging.INFO, exc_info: bool = False, **fields: object
) -> None:
    """Write one event. `name` is a constant in snake_case; everything that varies is a field.

    >>> event(logging.getLogger("doctest"), "version_published", policy_version=3, run="demo")
    """
    if logger.isEnabledFor(level):
        # stacklevel 2: the line of the caller, not of this function.
        logger.log(level, name, extra={_FIELDS_ATTRIBUTE: fields}, exc_info=exc_info, stacklevel=2)


def configure(
    level: int | str = logging.INFO, json: bool = False, *, stream: TextIO | None = None, **context: object
) -> None:
    """Send everything to stderr, one line a record; `context` (service, run) is added to every line.

    Calling it again replaces the former set-up. ValueError for a level that does not exist."""
    formatter: logging.Formatter = _JsonFormatter(context) if json else _LineFormatter(context)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.setLevel(level.upper() if isinstance(level, str) else level)
    for former in root.handlers[:]:
        root.removeHandler(former)
    root.addHandler(handler)
    # At DEBUG the Kafka client writes keys, values and headers of every record: trajectories are personal data.
    logging.getLogger("kafka").setLevel(max(logging.WARNING, root.level))


class _JsonFormatter(logging.Formatter):
    """{"at": ..., "level": ..., "logger": ..., "event": ..., fields}; a field never replaces one of the first four."""

    def __init__(self, context: Mapping[str, object]) -> None:
        super().__init__()
        self._context = dict(context)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Field] = {
            "at": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        for key, value in {**self._context, **_fields(record)}.items():
            line[f"field_{key}" if key in line else key] = _plain(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # allow_nan=False would raise inside logging; _plain has spelled them as text.
        return json_module.dumps(line, ensure_ascii=True)


class _LineFormatter(logging.Formatter):
    """`12:00:00.123 INFO  trainer.loop step_completed version=3 loss=0.1`."""

    def __init__(self, context: Mapping[str, object]) -> None:
        super().__init__()
        self._context = dict(context)

    def format(self, record: logging.LogRecord) -> str:
        fields = {**self._context, **_fields(record)}
        words = [_stamp(record)[11:23], f"{record.levelname:<7}", record.name, _one_line(record.getMessage())]
        words += [f"{key}={_quoted(_plain(value))}" for key, value in fields.items()]
        text = " ".join(words)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS_ATTRIBUTE, {})
    return fields


def _stamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds")


def _plain(value: object) -> Field:
    """A JSON value; floats that JSON has no spelling for become text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_FIELD_CHARS else f"{text[:MAX_FIELD_CHARS]}...[{len(text)} characters]"


def _quoted(value: Field) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = _one_line(text)
    return json_module.dumps(text) if not text or " " in text or '"' in text or "=" in text else text


def _one_line(text: str) -> str:
    """Control characters spelled out: a value from outside must not be able to forge a second line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
