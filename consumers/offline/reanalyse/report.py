"""A reanalysis for people and programs: a table, one JSON object written as it grows, a long Parquet table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from consumers.offline.reanalyse import StepComparison, Totals
from consumers.offline.reanalyse.judge import CARRIED_OVER

NOTES = (
    (
        "Decisions are judged anew at the instants they were made. Other settings would also have changed pacing, the "
        "later weights, and so the samples of every later version: this is no simulation of another run."
    ),
    "Ratios and corrections are those at the start of each step, of the weights that were really there.",
    (
        "A group that was dropped and would be kept is `usable` at the step it was dropped before; it is in no batch "
        "and in no ratio here."
    ),
    (
        "What time decided (lost, incomplete, unproven, abandoned, run_ended, poison_prompt, step_failed), duplicates "
        "and rows that do not validate are carried over as recorded."
    ),
)
LONG = pa.schema(
    [
        pa.field("version", pa.int64()),
        pa.field("quantity", pa.string()),
        pa.field("recorded", pa.float64()),
        pa.field("reanalysed", pa.float64()),
    ]
)
_SHOWN = (
    ("actor/ratio_ess", "ESS"), ("mismatch/raw_chi2", "chi2"), ("actor/pg_clipfrac", "clipped"),
    ("mismatch/raw_k3", "k3"),
)  # fmt: skip

_ALWAYS_SHOWN = frozenset(
    {"actor/ratio_ess", "actor/pg_clipfrac", "actor/rejected_fraction", "actor/log_ratio_p01", "actor/log_ratio_p99"}
)


def quantities(step: StepComparison) -> Iterable[tuple[str, float | None, float | None]]:
    """(name, recorded, reanalysed) of everything known of one version."""
    yield from _pairs(step.recorded.flat(), step.reanalysed.flat(), 0.0)
    yield from _pairs(step.logged, step.again, None)
    for name, value in step.applied.items():
        yield f"applied/{name}", None, value
    for kind, found in step.corrections.items():
        for name, value in found.items():
            yield f"correction/{kind}/{name}", None, value


def _pairs(
    a: Mapping[str, float], b: Mapping[str, float], default: float | None
) -> Iterable[tuple[str, float | None, float | None]]:
    for name in sorted(a.keys() | b.keys()):
        yield name, a.get(name, default), b.get(name, default)


def step_dict(step: StepComparison) -> dict[str, Any]:
    """Plain values of one version."""
    return {
        "version": step.version,
        "version_in": step.version_in,
        "recorded": step.recorded.to_dict(),
        "reanalysed": step.reanalysed.to_dict(),
        "statistics": {
            name: {"recorded": recorded, "reanalysed": again}
            for name, recorded, again in _pairs(step.logged, step.again, None)
        },
        "applied": dict(step.applied),
        "corrections": {kind: dict(found) for kind, found in step.corrections.items()},
        "rows_without_scores": step.rows_without_scores,
    }


def totals_dict(totals: Totals) -> dict[str, Any]:
    """Plain values of the run."""
    found = totals.reproduction
    return {
        "versions": totals.versions,
        "trajectories": totals.trajectories,
        "recorded": totals.recorded.to_dict(),
        "reanalysed": totals.reanalysed.to_dict(),
        "replays_dropped": dict(sorted(totals.replays_dropped.items())),
        "statistics": {
            name: {"recorded": recorded, "reanalysed": again}
            for name, recorded, again in _pairs(totals.own.metrics(), totals.other.metrics(), None)
        },
        "changes_sides": totals.sides.to_dict(),
        "would_have_been_dropped": totals.sides.lost,
        "would_have_been_usable": totals.sides.usable,
        "rewards": dict(totals.rewards),
        "rows_expired": totals.rows_expired,
        "rows_without_scores": totals.rows_without_scores,
        "rows_without_reference": totals.rows_without_reference,
        "members_without_penalty": totals.unscored_penalties,
        "reproduction": {
            "reproduced": not found.failed,
            "decisions": found.decisions,
            "decisions_different": found.different_count,
            "different": found.different,
            "carried_over": {
                reason: {"decisions": count, "decided_by": CARRIED_OVER.get(reason, "validation")}
                for reason, count in sorted(found.carried_over.items())
            },
            "steps_without_all_scores": found.partial_steps,
            "statistics": {name: asdict(one) for name, one in sorted(found.statistics.items())},
        },
        "problems": totals.problems,
        "problem_count": totals.problem_count,
    }


class JsonWriter:
    """One JSON object, a version at a time: never more than one of them in memory."""

    def __init__(self, write: Callable[[str], object], head: Mapping[str, Any]) -> None:
        """`head`: run, settings, and what else stands first."""
        self._write = write
        self._separator = ""
        write(json.dumps(finite(dict(head)), allow_nan=False)[:-1] + ', "versions": [')

    def add(self, step: StepComparison) -> None:
        """One version."""
        self._write(self._separator + json.dumps(finite(step_dict(step)), allow_nan=False))
        self._separator = ", "

    def close(self, totals: Totals) -> None:
        """The run."""
        self._write('], "totals": ' + json.dumps(finite(totals_dict(totals)), allow_nan=False) + "}\n")


class ParquetWriter:
    """version, quantity, recorded, reanalysed: one row each."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        schema = LONG.with_metadata({name: value.encode() for name, value in metadata.items()})
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema)

    def add(self, step: StepComparison) -> None:
        """One version."""
        rows = list(quantities(step))
        columns = [[step.version] * len(rows), *(list(column) for column in zip(*rows, strict=True))]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))

    def close(self, totals: Totals) -> None:
        """Nothing is added: totals are sums over the table."""
        self._writer.close()


def finite(value: Any) -> Any:
    """The same with null for numbers that JSON cannot write."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------- words


def step_line(step: StepComparison) -> str:
    """One version in one line."""
    a, b = step.recorded, step.reanalysed
    parts = [f"version {step.version:5d}  rows {_was(a.rows_trained, b.rows_trained)}"]
    dropped = _was(sum(a.rows_dropped.values()), sum(b.rows_dropped.values()))
    parts.append(f"dropped {dropped}")
    if b.rows_usable:
        parts.append(f"usable {b.rows_usable}")
    for name, word in _SHOWN:
        if name in step.logged or name in step.again:
            parts.append(f"{word} {_number(step.logged.get(name))} -> {_number(step.again.get(name))}")
    return "  ".join(parts)


def totals_lines(totals: Totals) -> list[str]:
    """The run in words."""
    a, b, found = totals.recorded, totals.reanalysed, totals.reproduction
    lines = [
        f"{totals.versions} versions, {totals.trajectories} trajectories",
        f"groups trained {_was(a.groups_trained, b.groups_trained)}, usable besides {b.groups_usable}",
        f"rows trained {_was(a.rows_trained, b.rows_trained)}, usable besides {b.rows_usable}",
    ]
    for reason in sorted(a.rows_dropped.keys() | b.rows_dropped.keys()):
        lines.append(f"  dropped {reason}: {_was(a.rows_dropped[reason], b.rows_dropped[reason])}")
    for name, side in sorted(totals.sides.sides.items()):
        values = side.to_dict()
        length, reward = values["mean_length_tokens"], values["mean_recorded_reward"]
        lines.append(f"  {name}: {side.rows} rows, mean length {_number(length)}, mean reward {_number(reward)}")
    for name, old, new in _pairs(totals.own.metrics(), totals.other.metrics(), None):
        if name in _ALWAYS_SHOWN or _number(old) != _number(new):
            lines.append(f"  {name}: {_number(old)} -> {_number(new)}")
    if totals.rewards:
        found_rewards = totals.rewards
        lines.append(
            f"rewards by {found_rewards['function']}: {found_rewards['scored']} scored, {found_rewards['changed']} "
            f"differ from the recorded ones, {found_rewards['failed']} failed"
        )
        lines += [f"  {count} x {cause}" for cause, count in found_rewards["causes"].items()]
    lines += ["", *_reproduction_lines(totals)]
    if totals.rows_without_scores:
        lines.append(
            f"{totals.rows_without_scores} rows have no stored scores and are in no ratio (--model makes them)"
        )
    if totals.rows_expired:
        lines.append(f"{totals.rows_expired} rows were removed by retention: their groups are carried over as recorded")
    if totals.rows_without_reference:
        lines.append(f"{totals.rows_without_reference} rows have no stored reference: the divergence is not computed")
    if totals.problem_count:
        lines.append(f"{totals.problem_count} problems in the log, the first: {totals.problems[0]}")
    lines += [f"carried over as recorded: {reason} ({count})" for reason, count in sorted(found.carried_over.items())]
    return lines


def _reproduction_lines(totals: Totals) -> list[str]:
    found = totals.reproduction
    exact = [name for name, one in found.statistics.items() if one.exact and one.compared and not one.different]
    wrong = [(name, one) for name, one in sorted(found.statistics.items()) if one.exact and one.different]
    derived = f"{found.decisions} decisions derived again, {found.different_count} differ"
    lines = [f"own settings: {derived}; {len(exact)} statistics reproduced exactly, {len(wrong)} not"]
    lines += [f"  differs: {words}" for words in found.different]
    lines += [f"  differs: {name}: {one.first_difference}" for name, one in wrong]
    cannot: dict[str, list[str]] = {}
    for name, one in sorted(found.statistics.items()):
        if not one.exact:
            cannot.setdefault(one.why_not, []).append(name)
    lines += [f"  not reproducible ({why}): {_some(names)}" for why, names in sorted(cannot.items())]
    return lines


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def _was(old: int, new: int) -> str:
    return str(old) if old == new else f"{old} -> {new}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
