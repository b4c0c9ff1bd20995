"""Which rows are scored again, under which version, and what is made of a difference. The model is a table here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.offline.audit import AuditReport
from consumers.offline.audit.recompute import RecomputeRules, recompute, recompute_lines
from schemas import policy_events as ev
from schemas.scores_codec import ScoreRow
from schemas.trajectory import Segment, Trajectory
from tests.fakes.scored_run import ScoredRun
from tests.fakes.tiny_export import PROXIMAL
from tests.fakes.tiny_forge import Forge, errors_of, notices_of
from tests.fakes.tiny_values import RUN

BEHAVIOUR = (-0.5, -0.25, -1.0)
"""of every row of the run, whoever sampled it"""
FIRST, SECOND = "tiny/p000000/e0/a0/0", "tiny/p000003/e0/a0/0"
TOLERANCE = 1e-4


class Table:
    """Log-probabilities by version, and by row where one differs."""

    def __init__(self, by_version: Mapping[int, Sequence[float]], by_row: Mapping[str, Sequence[float]]) -> None:
        self._by_version = by_version
        self._by_row = by_row
        self.asked: list[tuple[int, str]] = []

    def open(self, directory: Path) -> Any:
        """A scorer of the version in that directory."""
        return Scorer(self, int(directory.name[1:]))

    def answer(self, version: int, row: Trajectory) -> ScoreRow:
        self.asked.append((version, row.trajectory_id))
        values = self._by_row.get(f"{version}:{row.trajectory_id}", self._by_version[version])
        proximal = np.array(values, dtype=np.float32)
        return ScoreRow(trajectory_id=row.trajectory_id, version_in=version, proximal=proximal)


class Scorer:
    def __init__(self, table: Table, version: int) -> None:
        self._table, self._version = table, version

    def scores(self, rows: Sequence[Trajectory], version_in: int) -> Mapping[str, ScoreRow]:
        assert version_in == self._version
        return {row.trajectory_id: self._table.answer(version_in, row) for row in rows}


def ask(
    run: ScoredRun, by_row: Mapping[str, Sequence[float]] | None = None, *, rows: int = 100, **rules: Any
) -> AuditReport:
    """Version n gives every token -n, but for the rows of the table. Scores are not looked at, by a wide tolerance."""
    table = Table({n: (-float(n),) * 3 for n in range(4)}, by_row or {})
    values = {"seed": 0, "behaviour_tolerance": lambda dtype: TOLERANCE, "scores_tolerance": 99.0, **rules}
    return recompute(run.audit(), run.run_log(), run.store, table.open, RecomputeRules(rows=rows, **values))


def honest(run: ScoredRun, *, but: Sequence[str] = ()) -> dict[str, Sequence[float]]:
    """A table in which each row has the numbers of its version, but for some."""
    found: dict[str, Sequence[float]] = {}
    for entry in run.run_log().trajectories():
        for row in entry.rows:
            if row.trajectory is not None and row.trajectory_id not in but:
                found |= {f"{segment.version}:{row.trajectory_id}": BEHAVIOUR for segment in row.trajectory.segments}
    return found


def test_rows_with_the_numbers_of_their_versions_are_counted_by_version(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)

    report = ask(run, honest(run))

    assert (report.errors, report.notices) == (0, 0)
    section = report.to_dict()["recompute"]
    assert (section["asked"], section["trajectories"], section["not_checked"]) == (100, 12, {})
    assert section["behaviour"]["0"]["trajectories"] + section["behaviour"]["2"]["trajectories"] == 12
    assert section["behaviour"]["0"] == {
        "trajectories": 8, "tokens": 24, "max_difference": 0.0, "mean_difference": 0.0,
    }  # fmt: skip
    assert report.counts["tokens_recomputed"] == report.counts["scores_recomputed"] == 36
    assert {"recompute.behaviour", "recompute.scores"} <= set(report.checks)
    assert any("behaviour 36 tokens under 2 versions" in line for line in recompute_lines(section))


def test_a_stamp_that_lies_is_named_with_the_version_that_fits(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    table = honest(run, but=[SECOND]) | {f"2:{SECOND}": BEHAVIOUR}

    errors = errors_of(ask(run, table))

    assert set(errors) == {"recompute.behaviour"}
    assert errors["recompute.behaviour"] == (
        f"{SECOND}: tokens 0-2: version 0 is claimed, and its weights differ by up to 1 (tolerance 0.0001); "
        "the weights of version 2 fit (0)\n"
    )


def test_a_row_that_no_retained_version_fits_is_an_error_that_says_so(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)

    report = ask(run, honest(run, but=[FIRST]))

    assert "no retained version fits" in errors_of(report)["recompute.behaviour"]
    finding = report.findings[0]
    assert (finding.subject, finding.evidence["claimed"], finding.evidence["fits"]) == (FIRST, 0, None)
    assert finding.evidence["version"] == 1


@pytest.mark.parametrize(("off", "errors", "notices"), [(0.5, 0, 0), (5.0, 0, 1), (20.0, 1, 0), (np.nan, 2, 0)])
def test_between_one_and_ten_tolerances_it_is_a_notice(tmp_path: Path, off: float, errors: int, notices: int) -> None:
    """What is no number fits no tolerance: then the trainer's scores are an error too."""
    run = ScoredRun(tmp_path)
    near = (BEHAVIOUR[0], BEHAVIOUR[1], BEHAVIOUR[2] + off * TOLERANCE)

    report = ask(run, honest(run) | {f"0:{FIRST}": near})

    assert (report.errors, report.notices) == (errors, notices)


def test_each_segment_is_scored_under_its_own_version(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    proofs = [record.offset for record in Forge(run).policy_records(ev.VersionLoaded)]
    segments = (Segment(version=0, length=1, proof=proofs[0]), Segment(version=1, length=2, proof=proofs[2]))
    Forge(run).edit_trajectory(SECOND, segments=segments)
    table = honest(run) | {f"0:{SECOND}": (-0.5, 9, 9), f"1:{SECOND}": (9, -0.25, -1.0)}

    section = ask(run, table).sections["recompute"]
    lying = ask(run, table | {f"1:{SECOND}": (9, 9, 9), f"0:{SECOND}": BEHAVIOUR})

    assert section["behaviour"]["1"] == {
        "trajectories": 1, "tokens": 2, "max_difference": 0.0, "mean_difference": 0.0,
    }  # fmt: skip
    words = errors_of(lying)["recompute.behaviour"]
    assert f"{SECOND}: tokens 1-2: version 1 is claimed" in words
    assert "the weights of version 0 fit" in words


def test_tokens_that_the_policy_did_not_sample_are_not_compared(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    mask = np.array([True, False, True])
    Forge(run).edit_trajectory(FIRST, loss_mask=mask, logprobs=np.array([-0.5, 0.0, -1.0], dtype=np.float32))

    section = ask(run, honest(run) | {f"0:{FIRST}": (-0.5, 9.0, -1.0)}).sections["recompute"]

    assert section["behaviour"]["0"]["tokens"] == 23
    assert section["behaviour"]["0"]["max_difference"] == 0.0


def test_the_trainers_own_numbers_are_checked_under_the_version_of_the_step(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    table = {f"{version}:{row}": PROXIMAL for version, row in ((0, FIRST), (1, SECOND))}

    report = ask(run, table, scores_tolerance=TOLERANCE, behaviour_tolerance=lambda dtype: 99.0)

    named = {finding.subject for finding in report.findings}
    assert not named & {FIRST, SECOND}
    assert (
        "the trainer's scores in the step of version 2: version 1 is claimed" in errors_of(report)["recompute.scores"]
    )


def test_versions_that_are_gone_are_counted_as_not_checked(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    run.append_event(ev.VersionRetired(run=RUN, at_us=1_000_000, version=0, rule="keep=2"))
    run.store.delete("tiny/a000/manifest.json")

    report = ask(run, honest(run))

    section = report.sections["recompute"]
    why = "retired: its weights were removed at 1970-01-01T00:00:01.000000Z by rule keep=2"
    assert section["not_checked"] == {"0": {"claims": 12, "why": why}}
    assert set(section["behaviour"]) == {"2"}
    assert recompute_lines(section)[-1] == f"  version 0: 12 claims not checked: {why}"
    assert notices_of(report) == {"G1.open"}


def test_a_seed_chooses_the_rows_and_a_version_narrows_them(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)

    def chosen(**options: Any) -> set[str]:
        report = ask(run, rows=2, **options)
        return {finding.subject for finding in report.findings}

    assert chosen() == chosen()
    assert len(chosen()) == 2
    assert len({frozenset(chosen(seed=seed)) for seed in range(5)}) > 1
    into_2 = ask(run, version=2)
    assert {finding.evidence["version"] for finding in into_2.findings} == {2}
    assert into_2.sections["recompute"]["trajectories"] == 4


def test_rows_that_are_not_in_the_log_are_counted(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    Forge(run).edit_decision(FIRST, offset=77)

    assert ask(run, honest(run)).sections["recompute"]["not_in_the_log"] == 1
