"""Topics of a run as Parquet: whole tables under one folder, with a manifest of what they hold.

The log is read as it stands when the export begins, also while the run goes on. Nothing appears under the final
name before everything is written; an existing folder is replaced only on demand, and only when it is an export.
Memory: one batch, what the ledger says by id, and bounded Parquet buffers; never the tokens of a run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from consumers.offline.cache import TrajectoryCache
from consumers.offline.export import tables as tables
from consumers.offline.export.index import DecisionIndex, GroupOutcome, open_groups
from consumers.offline.export.parquet import SmallTable
from consumers.offline.export.ranges import missing_ranges, require_whole
from consumers.offline.export.scores import spool_scores
from consumers.offline.export.trajectories import TrajectoriesTable
from consumers.offline.run_log import RunLog
from consumers.offline.trajectory_batches import NO_ROWS, RefusedRow, trajectory_batches
from schemas.errors import IllegalState, UsageError
from schemas.heartbeat import Heartbeat
from schemas.ledger import StepCompleted
from schemas.topics import TopicName, topic

MANIFEST = "manifest.json"
FORMAT = 1
TABLES = ("trajectories", "decisions", "groups", "requests", "steps", "policy", "workers")
_TOPICS = {
    "trajectories": (TopicName.LEDGER, TopicName.TRAJECTORIES, TopicName.SCORES),
    "decisions": (TopicName.LEDGER,),
    "groups": (TopicName.LEDGER, TopicName.PROMPTS),
    "requests": (TopicName.PROMPTS,),
    "steps": (TopicName.LEDGER,),
    "policy": (TopicName.POLICY,),
    "workers": (TopicName.WORKERS,),
}
_ACCEPT = "Export what is left with --allow-missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What is wanted."""

    tables: tuple[str, ...] = TABLES
    tokens: bool = True
    """token ids, masks and log-probabilities per token"""
    text: bool = True
    """decoded prompts and completions"""
    allow_missing: bool = False
    """export what is left of a log with gaps or unreadable records, and say so in the manifest"""
    force: bool = False
    """replace an export that is there"""

    def __post_init__(self) -> None:
        unknown = [name for name in self.tables if name not in TABLES]
        if unknown or not self.tables:
            raise UsageError(f"--tables {','.join(self.tables)}: known are {','.join(TABLES)}")


@dataclass(slots=True, kw_only=True)
class ExportReport:
    """What an export holds; the manifest."""

    run: str
    build: str
    created_at_us: int
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    topics: dict[str, dict[str, int]] = field(default_factory=dict)
    """`<topic>[<partition>]` -> first record and end that were read"""
    is_ended: bool = False
    undecided: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    """rows and records that fail validation, by code"""
    missing: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("run", "build", "created_at_us", "tables", "topics", "is_ended", "undecided", "refused", "missing",
                 "unreadable", "options")  # fmt: skip
        return {"format": FORMAT, **{name: getattr(self, name) for name in names}}

    def lines(self) -> list[str]:
        """For a person."""
        said = [f"{name:14} {counts['rows']:>12,} rows" for name, counts in self.tables.items()]
        if any(self.undecided.values()):
            words = ", ".join(f"{count:,} {name}" for name, count in self.undecided.items() if count)
            state = "the run has ended" if self.is_ended else "the run is under way"
            said.append(f"not decided yet ({state}): {words}")
        said += [f"refused        {count:>12,} {code}" for code, count in sorted(self.refused.items())]
        return said + [f"missing: {words}" for words in (*self.missing, *self.unreadable)]


def export(
    run_log: RunLog,
    out: Path,
    options: ExportOptions,
    *,
    now_us: int,
    build: str,
    cache: Callable[[DecisionIndex], TrajectoryCache] | None = None,
) -> ExportReport:
    """Write the tables. `cache`: gives the cache to read trajectories from, brought up to date; None: read the log."""
    _require_free(out, force=options.force)
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        report = _Export(run_log, scratch, options, ExportReport(run=run_log.run, build=build, created_at_us=now_us))
        finished = report.run(cache)
        (scratch / MANIFEST).write_text(json.dumps(finished.to_dict(), indent=1) + "\n", encoding="utf-8")
        _put(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return finished


def _require_free(out: Path, *, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise UsageError(f"{out} exists: choose another --out, or replace it with --force")
    if not _is_export(out):
        raise UsageError(f"{out} is not an export of driftlog (no manifest of one): remove it yourself")


def _is_export(out: Path) -> bool:
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and "format" in manifest and "tables" in manifest


def _put(scratch: Path, out: Path) -> None:
    """One rename; what was there is moved aside before and removed after."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        os.replace(out, aside)
    os.replace(scratch, out)
    shutil.rmtree(aside, ignore_errors=True)


class _Export:
    """One export on its way."""

    def __init__(self, run_log: RunLog, root: Path, options: ExportOptions, report: ExportReport) -> None:
        self._log = run_log
        self._root = root
        self._options = options
        self._report = report
        self._index = DecisionIndex()

    def run(self, cache: Callable[[DecisionIndex], TrajectoryCache] | None) -> ExportReport:
        wanted = set(self._options.tables)
        names = {name for table in wanted for name in _TOPICS[table]}
        self._require_whole(names - {TopicName.TRAJECTORIES} if cache is not None else names)
        if TopicName.LEDGER in names:
            self._ledger(wanted)
        if TopicName.TRAJECTORIES in names and cache is None:
            self._require_whole({TopicName.TRAJECTORIES})  # now that the ledger says what the trainer has read
        if TopicName.PROMPTS in names:
            self._requests(wanted)
        if "policy" in wanted:
            with self._table("policy", tables.POLICY) as table:
                table.add(tables.policy_row(entry) for entry in self._log.policy())
        if "workers" in wanted:
            last: dict[tuple[str, str], Heartbeat] = {(b.worker, b.incarnation): b for b in self._log.heartbeats()}
            with self._table("workers", tables.WORKERS) as table:
                table.add(tables.worker_rows(last))
        if "trajectories" in wanted:
            self._trajectories(None if cache is None else cache(self._index))
        self._describe(names)
        return self._report

    # ------------------------------------------------------------ tables

    def _ledger(self, wanted: Collection[str]) -> None:
        decisions = self._table("decisions", tables.DECISION_ROWS) if "decisions" in wanted else None
        steps = self._table("steps", tables.STEPS) if "steps" in wanted else None
        metrics = self._table("step_metrics", tables.STEP_METRICS) if "steps" in wanted else None
        name = topic(self._log.run, TopicName.LEDGER)
        for transaction in self._log.transactions():
            self._unreadable(f"{name}[0]@{problem.offset}: {problem.message}" for problem in transaction.problems)
            self._index.add(transaction)
            if decisions is not None:
                decisions.add(tables.decision_rows(transaction))
            if steps is not None and metrics is not None and isinstance(transaction.control, StepCompleted):
                steps.add([tables.step_row(transaction, transaction.control)])
                metrics.add(tables.metric_rows(transaction.control))
        for table in (decisions, steps, metrics):
            if table is not None:
                table.close()
        self._index.freeze()

    def _requests(self, wanted: Collection[str]) -> None:
        schema = tables.without(tables.REQUESTS, tokens=self._options.tokens, text=self._options.text)
        requests = self._table("requests", schema) if "requests" in wanted else None
        groups = self._table("groups", tables.GROUPS) if "groups" in wanted else None
        seen: set[str] = set()
        name = topic(self._log.run, TopicName.PROMPTS)
        for entry in self._log.requests():
            if entry.request is None:
                self._unreadable([f"{name}[{entry.partition}]@{entry.offset}: {entry.problem}"])
                continue
            group_id = entry.request.group_id
            if requests is not None:
                requests.add([tables.request_row(entry, entry.request, schema)])
            if groups is not None and group_id not in seen:
                outcome = self._index.groups.get(group_id) or GroupOutcome()
                groups.add([tables.group_row(entry.request, group_id, outcome)])
            seen.add(group_id)
        if groups is not None:
            strangers = [(one, outcome) for one, outcome in self._index.groups.items() if one not in seen]
            groups.add(tables.group_row(None, one, outcome) for one, outcome in strangers)
            self._report.undecided["groups"] = open_groups(self._index.groups, len(seen | set(self._index.groups)))
            groups.close()
        if requests is not None:
            requests.close()

    def _trajectories(self, cache: TrajectoryCache | None) -> None:
        options = self._options
        scores, problems = spool_scores(self._log, self._root)
        try:
            self._unreadable(problems)
            table = TrajectoriesTable(
                self._root / "trajectories", self._index, scores, tokens=options.tokens, text=options.text
            )
            refused_table = self._table("refused", tables.REFUSED)
            refused: Counter[str] = Counter()
            for rows, bad in self._batches(cache):
                table.add(rows)
                refused.update(one.code for one in bad)
                refused_table.add(tables.refused_row(one) for one in bad)
            table.close()
            refused_table.close()
        finally:
            scores.close()
        self._report.tables["trajectories"] = {"rows": table.rows, "files": table.files}
        self._report.undecided |= {f"trajectories {why}": count for why, count in table.undecided.items()}
        self._report.refused = dict(refused)

    def _batches(self, cache: TrajectoryCache | None) -> Iterable[tuple[pa.RecordBatch, tuple[RefusedRow, ...]]]:
        if cache is None:
            known = frozenset(self._index.known_foreign)
            for batch in trajectory_batches(self._log, known_foreign=known):
                yield batch.rows, batch.refused
        else:
            yield NO_ROWS, tuple(cache.refused)
            for rows in cache.batches():
                yield rows, ()

    # ------------------------------------------------------------ what is said of it

    def _table(self, name: str, schema: pa.Schema) -> _Counted:
        return _Counted(self._root / f"{name}.parquet", schema, self._report.tables.setdefault(name, {"rows": 0}))

    def _require_whole(self, names: Collection[TopicName]) -> None:
        found = missing_ranges(self._log, names, self._index.position)
        if not self._options.allow_missing:
            require_whole(found, _ACCEPT)
        self._report.missing = sorted({*self._report.missing, *(gap.words for gap in found)})

    def _unreadable(self, problems: Iterable[str]) -> None:
        for words in problems:
            if not self._options.allow_missing:
                raise IllegalState(f"{words}. Nothing was skipped: see `driftlog audit`. {_ACCEPT}")
            self._report.unreadable.append(words)

    def _describe(self, names: Collection[TopicName]) -> None:
        report, options = self._report, self._options
        report.is_ended = self._index.is_ended
        wanted = {topic(self._log.run, name): name for name in names}
        firsts = {full: self._log.beginnings(name) for full, name in wanted.items()}
        report.topics = {
            f"{full}[{partition}]": {"first": firsts[full][partition], "end": end}
            for (full, partition), end in sorted(self._log.ends.items())
            if full in wanted
        }
        report.options = {"tables": list(options.tables), "tokens": options.tokens, "text": options.text}


class _Counted(SmallTable):
    """Tells the report its rows when it is closed."""

    def __init__(self, path: Path, schema: pa.Schema, counts: dict[str, int]) -> None:
        super().__init__(path, schema)
        self._counts = counts

    def close(self) -> None:
        """End the file."""
        super().close()
        self._counts["rows"] = self.rows

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
