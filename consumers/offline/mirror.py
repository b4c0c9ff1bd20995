"""Compares what an experiment tracker holds of a run with what the log says, entry for entry.

`ExpectedMirror` takes the projection's rows as a tracker would; `compare` is a difference of two mappings. No I/O.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from consumers.projection import Projection
from consumers.projection_rows import BlockRow, Bookmark, EndRow, Row, StepRow, merge_versions
from infra import mirror_entries as entries
from infra.mirror_entries import Mirror, cut, safe_name
from infra.ports import Record
from infra.tracker_port import RunOrigin
from schemas.errors import InvalidRecord
from schemas.headers import is_arrow
from schemas.ids import RunId
from schemas.ledger import Settled, decode_ledger_control
from schemas.topics import TopicName, topic

_LATE = ("registry/", "alias/", "file/")
_OF_A_VERSION = ("version/", "model_input/", "model_output/")
_SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry that is not what the log says."""

    entry: str
    expected: str | None
    """None: the log knows nothing of it"""
    actual: str | None
    """None: it is missing"""

    def text(self) -> str:
        """For a person."""
        name = self.entry
        if self.actual is None:
            return f"{name}: missing" + (f" (the log says {_short(self.expected)})" if self.expected else "")
        if self.expected is None:
            return f"{name}: not from this log" + (f" ({_short(self.actual)})" if self.actual else "")
        return f"{name}: {_short(self.actual)}, the log says {_short(self.expected)}"


def compare(expected: Mirror, actual: Mirror) -> list[Difference]:
    """What differs, sorted by entry. A version that is missing whole is one difference."""
    found = []
    for entry in sorted(expected.keys() | actual.keys()):
        wanted, there = expected.get(entry), actual.get(entry)
        if wanted == there or (wanted is not None and there is not None and _is_cut(entry, there, wanted)):
            continue
        head = entries.version_name(entry.split("/")[1]) if entry.startswith(_OF_A_VERSION) else entry
        if head != entry and (head in expected) != (head in actual):
            continue
        found.append(Difference(entry=entry, expected=wanted, actual=there))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a tracker holds of a log."""

    mirror: Mirror
    bookmark: Bookmark
    records_beyond: int
    """records behind `up_to` that have something to show"""


def expected_mirror(
    origin: RunOrigin,
    params: Sequence[Mapping[str, str]],
    records: Iterable[Record],
    *,
    up_to: Bookmark | None = None,
    best_metric: str = "",
) -> Expected:
    """What a tracker holds after these records: every topic the projection reads, each in offset order.

    up_to: only what this bookmark covers; the tracker is that far."""
    run = RunId(origin.run)
    limits = _limits(run, up_to)
    projection = Projection(run, best_metric=best_metric)
    rows: list[Row] = []
    beyond = 0
    for record in records:
        if record.offset >= limits.get(record.topic, record.offset + 1):
            beyond += _shows_something(record, topic(run, TopicName.LEDGER))
            continue
        try:
            rows += projection.apply(record)
        except InvalidRecord:
            continue  # counted by the audit of the log; the tracker shows nothing of it either
    mirror: dict[str, str] = {
        entries.run_tag("run"): run,
        entries.run_tag("log"): origin.log_id,
        "run/name": run,
        "run/status": projection.ended or "killed",
        "run/started_ms": str(origin.started_at_us // 1_000),
    }
    for key, values in entries.param_values(params).items():
        mirror |= {entries.param(entries.segment_name(key, place)): value for place, value in enumerate(values)}
    for row in merge_versions(rows):
        _add(mirror, run, row)
    if projection.ended is None:
        mirror.pop("run/ended_ms", None)
    _add_standing(mirror, projection)
    return Expected(mirror=mirror, bookmark=projection.bookmark(), records_beyond=beyond)


def _limits(run: RunId, up_to: Bookmark | None) -> dict[str, int]:
    if up_to is None:
        return {}
    return {
        topic(run, TopicName.POLICY): up_to.policy,
        topic(run, TopicName.LEDGER): up_to.ledger,
        topic(run, TopicName.EVALUATIONS): up_to.evaluations,
    }


def _shows_something(record: Record, ledger: str) -> bool:
    """Decisions and settle transactions are shown with the step that follows them."""
    if record.topic != ledger:
        return True
    if is_arrow(record.headers):
        return False
    try:
        return not isinstance(decode_ledger_control(record.value), Settled)
    except InvalidRecord:
        return False


def while_running(mirror: Mirror) -> Mirror:
    """Without what a projector at work brings up to date only now and then."""
    return {
        entry: value
        for entry, value in mirror.items()
        if not entry.startswith(_LATE) and entry not in ("run/status", "run/ended_ms")
    }


def _add(mirror: dict[str, str], run: str, row: Row) -> None:
    if isinstance(row, StepRow):
        mirror |= _points(row.step, row.metrics, row.at_us)
    elif isinstance(row, BlockRow):
        profile = json.dumps({"records": row.read.records})
        mirror[f"dataset/{row.name}"] = f"{entries.range_source(row.read)} {profile}"
        mirror[f"file/{row.path}"] = row.text
    elif isinstance(row, EndRow):
        mirror["run/ended_ms"] = str(row.at_us // 1_000)
    else:
        version = row.version
        mirror |= _points(version, row.metrics, row.at_us)
        mirror[entries.version_name(version)] = f"{entries.model_name(run, version)} READY"
        mirror[entries.version_tag(version, "run")] = run
        mirror[entries.version_tag(version, "version")] = str(version)
        mirror[f"model_output/{version}"] = str(version)
        for key, value in row.tags.items():
            mirror[entries.version_tag(version, key)] = cut(value, entries.TAG_CHARS)
        if row.parent is not None:
            mirror[entries.version_tag(version, "parent")] = str(row.parent)
            mirror[entries.version_tag(version, "parent_model_id")] = f"model of version {row.parent}"
            mirror[f"model_input/{row.parent}"] = ""
        for name, number in row.metrics.items():
            mirror[entries.version_point(version, safe_name(name), version, row.at_us // 1_000, float(number))] = ""


def _points(step: int, metrics: Mapping[str, float], at_us: int) -> dict[str, str]:
    return {
        entries.point(safe_name(key), step, at_us // 1_000, float(value)): ""
        for key, value in metrics.items()
        if math.isfinite(value)
    }


def _add_standing(mirror: dict[str, str], projection: Projection) -> None:
    wanted = projection.promotions()
    for version in wanted.versions:
        uri, sha256 = wanted.sources[version]
        mirror[f"registry/{version}"] = f"{entries.registry_source(uri)} {sha256}"
    mirror |= {f"alias/{alias}": str(version) for alias, version in wanted.aliases.items()}
    open_file = projection.open_file()
    if open_file is not None:
        mirror[f"file/{open_file[0]}"] = open_file[1]


def _is_cut(entry: str, there: str, wanted: str) -> bool:
    return entry.startswith("param/") and entries.same_param(there, wanted)


def _short(text: str | None) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}... ({len(text or '')} characters)"
