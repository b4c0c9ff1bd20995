"""`diff`: two runs, step by step along the line to their newest version: examples, order, decisions, weights.

Steps are paired by training steps from version 0, rows by their place in the batch. Streams: one step of each run is
in memory. What may differ without a word is in diff_content; other settings are told, and are no difference.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from consumers.offline.diff.content import GroupName, UsedRow, group_name, group_words, row_differences
from consumers.offline.run_log import RunLog
from consumers.offline.trained_steps import TrainedStep, trained_steps
from consumers.offline.wholeness import readable_transactions, require_policy_and_ledger
from infra.ports import CheckpointStore
from schemas.checkpoint import OPTIMIZER_NAME
from schemas.errors import CheckpointError, IllegalState, RangeMissing
from schemas.ledger import Decision, StepCompleted, Subject
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus

MOST_DIFFERENCES = 50
GroupDecision = tuple[GroupName, str, str]
"""(group, decision, reason)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not the same."""

    step: int
    """training steps from version 0"""
    version_a: int | None
    version_b: int | None
    position: int | None
    """place in the batch; None: about the step as a whole"""
    field: str
    a: Any
    b: Any
    row: str = ""
    """prompt, epoch, attempt and index"""

    @property
    def words(self) -> str:
        """For a person."""
        versions = f"version {self.version_a}" if self.version_a == self.version_b else self._both()
        where = "" if self.position is None else f", position {self.position}"
        return f"{versions}{where}{f' ({self.row})' if self.row else ''}: {self.field}: {self.a!r} / {self.b!r}"

    def _both(self) -> str:
        return f"step {self.step} (version {self.version_a} / {self.version_b})"


@dataclass(slots=True, kw_only=True)
class DiffReport:
    """Filled while it goes."""

    run_a: str
    run_b: str
    config: Mapping[str, tuple[Any, Any]]
    """key -> value in A, value in B"""
    differences: list[Difference] = field(default_factory=list)
    """the first ones, in order"""
    steps_that_differ: list[int] = field(default_factory=list)
    steps: int = 0
    rows: int = 0
    weights: int = 0
    """versions whose files were compared"""
    weights_not_retained: int = 0
    last_weights: tuple[str, str] = ("", "")
    """sha256 of the newest weights that were compared"""
    dropped: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    """rows by the reason they were dropped for: told, not compared, since a restart may send a group again"""

    @property
    def equal(self) -> bool:
        """Everything that was compared is."""
        return not self.steps_that_differ

    def add(self, difference: Difference) -> None:
        """One more."""
        if difference.step not in self.steps_that_differ[-1:]:
            self.steps_that_differ.append(difference.step)
        if len(self.differences) < MOST_DIFFERENCES:
            self.differences.append(difference)

    def to_json(self) -> str:
        """One JSON object."""
        content = {
            "equal": self.equal,
            "run_a": self.run_a,
            "run_b": self.run_b,
            "steps": self.steps,
            "rows": self.rows,
            "weights": self.weights,
            "weights_not_retained": self.weights_not_retained,
            "last_weights_sha256": list(self.last_weights),
            "first": asdict(self.differences[0]) if self.differences else None,
            "differences": [asdict(one) for one in self.differences],
            "steps_that_differ": self.steps_that_differ,
            "config": {key: list(values) for key, values in self.config.items()},
            "rows_dropped": [dict(self.dropped[0]), dict(self.dropped[1])],
        }
        return json.dumps(content, indent=2, default=str)

    def lines(self) -> list[str]:
        """For a person."""
        lines = [f"{key}: {a!r} / {b!r}" for key, (a, b) in self.config.items()]
        lines = [f"A is run {self.run_a}, B is run {self.run_b}", *(f"  setting {line}" for line in lines)]
        for name, counts in zip("AB", self.dropped, strict=True):
            if counts:
                dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items()))
                lines.append(f"  rows dropped in {name}: {dropped}")
        compared = f"{self.steps} steps, {self.rows} rows, weights of {self.weights} versions"
        if self.weights_not_retained:
            compared += f" ({self.weights_not_retained} more are not retained in both)"
        if self.equal:
            lines.append(f"equal: {compared}; the last weights have sha256 {self.last_weights[0][:16] or '?'}...")
            return lines
        lines.append(f"different: {compared}; {len(self.steps_that_differ)} steps differ")
        lines.append(f"first difference: {self.differences[0].words}")
        lines += [f"  then: {one.words}" for one in self.differences[1:6]]
        return lines


class DiffSide:
    """One of the two runs."""

    def __init__(self, log: RunLog, store: CheckpointStore, settings: Mapping[str, Any]) -> None:
        self.log = log
        self.settings = settings
        self._store = store
        require_policy_and_ledger(log)
        self.fold = PolicyFold()
        for _ in log.policy(self.fold):
            pass
        line = [] if self.fold.newest is None else self.fold.line(self.fold.newest)
        self.line = {self.fold.versions[version].depth: version for version in reversed(line)}
        """training steps -> version, along the line to the newest; of two at one depth the later: a branch start"""
        self._on_line = frozenset(line)
        self.dropped: Counter[str] = Counter()

    def depth(self, version: int) -> int | None:
        """Training steps from version 0."""
        state = self.fold.versions.get(version)
        return None if state is None else state.depth

    def steps(self, last: int | None) -> Generator[tuple[int, TrainedStep, list[GroupDecision]], None, None]:
        """(training steps, the step, groups decided since the one before), in order. IllegalState names the run."""
        with ExitStack() as stack:
            decisions = stack.enter_context(closing(self._decisions()))
            steps = stack.enter_context(closing(trained_steps(self.log)))
            while True:
                try:
                    step = next(steps, None)
                except RangeMissing as error:
                    raise RangeMissing(f"run {self.log.run}: {error}", error.first) from error
                if step is None:
                    return
                groups = next(groups for version, groups in decisions if version == step.control.version_out)
                depth = self.depth(step.control.version_out)
                if (
                    step.control.version_out not in self._on_line
                    or depth is None
                    or (last is not None and depth > last)
                ):
                    continue
                if None in step.rows:
                    raise IllegalState(f"run {self.log.run}: version {step.control.version_out}: {step.problems[0]}")
                yield depth, step, groups

    def _decisions(self) -> Generator[tuple[int, list[GroupDecision]], None, None]:
        groups: list[GroupDecision] = []
        for transaction in readable_transactions(self.log):
            for row in transaction.decisions:
                if row.subject is Subject.GROUP and row.group_id is not None:
                    groups.append((group_name(row.group_id), row.decision.value, row.reason))
                elif row.subject is Subject.TRAJECTORY and row.decision is Decision.DROPPED:
                    self.dropped[row.reason] += 1
            if isinstance(transaction.control, StepCompleted):
                yield transaction.control.version_out, groups
                groups = []

    def files(self, depth: int) -> dict[str, str] | None:
        """Weights and optimizer by name -> sha256, every byte checked; None when they are not retained."""
        version = self.line.get(depth)
        state = None if version is None else self.fold.versions[version]
        if state is None or state.status is VersionStatus.RETIRED:
            return None
        try:
            _, manifest = self._store.fetch(state.event.manifest_uri, state.event.manifest_sha256)
        except CheckpointError as error:
            raise IllegalState(f"run {self.log.run}: version {version}: {error}") from error
        kept = [f for f in manifest.files if f.name.endswith(".safetensors") and f.name.startswith(("model", "optim"))]
        return {entry.name: entry.sha256 for entry in kept}


def diff(a: DiffSide, b: DiffSide, *, last: int | None = None) -> DiffReport:
    """Compare; `last`: only up to that many training steps."""
    report = DiffReport(run_a=a.log.run, run_b=b.log.run, config=_settings(a.settings, b.settings))
    _weights(a, b, 0, report)
    with ExitStack() as stack:
        steps_a, steps_b = (stack.enter_context(closing(side.steps(last))) for side in (a, b))
        for found_a, found_b in zip_longest(steps_a, steps_b):
            if found_a is None or found_b is None:
                depth = (found_a or found_b)[0]
                versions = [None if found is None else found[1].control.version_out for found in (found_a, found_b)]
                _tell(report, depth, versions, None, "step", *(v if v is not None else "none" for v in versions))
                break
            report.steps += 1
            _compare(a, b, found_a, found_b, report)
            _weights(a, b, found_a[0], report)
    report.dropped = (a.dropped, b.dropped)
    return report


def _compare(
    a: DiffSide,
    b: DiffSide,
    found_a: tuple[int, TrainedStep, list[GroupDecision]],
    found_b: tuple[int, TrainedStep, list[GroupDecision]],
    report: DiffReport,
) -> None:
    depth = found_a[0]
    versions = [found_a[1].control.version_out, found_b[1].control.version_out]
    if depth != found_b[0]:
        _tell(report, depth, versions, None, "training steps", depth, found_b[0])
    for place, (one, two) in enumerate(zip_longest(found_a[2], found_b[2])):
        if one != two:
            _tell(report, depth, versions, None, f"group decision {place}", _group(one), _group(two))
            break
    for place, (left, right) in enumerate(zip_longest(_rows(found_a[1]), _rows(found_b[1]))):
        if left is None or right is None:
            names = (None if row is None else row.name for row in (left, right))
            _tell(report, depth, versions, place, "row", *names)
            break
        report.rows += 1
        for name, one, two in row_differences(left, right, a.depth, b.depth):
            _tell(report, depth, versions, place, name, one, two, row=left.name)


def _weights(a: DiffSide, b: DiffSide, depth: int, report: DiffReport) -> None:
    files_a, files_b = a.files(depth), b.files(depth)
    if files_a is None or files_b is None:
        report.weights_not_retained += 1
        return
    report.weights += 1
    first = min((name for name in files_a if name != OPTIMIZER_NAME), default="")
    report.last_weights = (files_a.get(first, ""), files_b.get(first, ""))
    versions = [a.line.get(depth), b.line.get(depth)]
    for name in sorted(files_a.keys() | files_b.keys()):
        if files_a.get(name) != files_b.get(name):
            _tell(report, depth, versions, None, f"sha256 of {name}", files_a.get(name), files_b.get(name))


def _tell(
    report: DiffReport,
    depth: int,
    versions: Sequence[int | None],
    place: int | None,
    name: str,
    a: Any,
    b: Any,
    *,
    row: str = "",
) -> None:
    report.add(
        Difference(
            step=depth, version_a=versions[0], version_b=versions[1], position=place, field=name, a=a, b=b, row=row
        )
    )


def _rows(step: TrainedStep) -> Iterator[UsedRow]:
    for decision, trajectory in zip(step.decisions, step.whole_rows, strict=True):
        yield UsedRow(decision=decision, trajectory=trajectory)


def _group(found: GroupDecision | None) -> str | None:
    return None if found is None else f"{group_words(found[0])} {found[1]} {found[2]}".strip()


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(a.keys() | b.keys())
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}
