"""A list of falsifications of log and store, each made on a small run of the real trainer, each named by the audit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consumers.offline.audit import AuditReport, audit, rules_from_configs
from consumers.offline.audit.recompute import RecomputeRules, recompute
from consumers.offline.reanalyse.scoring import Rescorer
from infra.checkpoint_store import FsspecCheckpointStore
from tests.fakes.memory_log import MemoryLog
from tests.fakes.played_run import PlayedRun
from tests.fakes.tiny_forge import Forge, errors_of
from tests.sim.services import RUN
from tests.unit.offline.falsifications import FALSIFICATIONS, Falsification, table

REWARDS = (2.0, 0.0, 1.0, 0.5)
ALL = 1_000


def play(run: PlayedRun) -> PlayedRun:
    """Three versions: a row of garbage, lags 0 and 1, a group that is too old; up to the end."""
    run.send_bytes(b"these are no Arrow bytes")
    run.play(0, 1, version=0, rewards=REWARDS)
    run.go_live(1)
    run.play(2, 3, version=0, rewards=REWARDS)
    run.go_live(2)
    run.play(4, version=0, rewards=REWARDS)
    run.play(5, version=1, rewards=REWARDS)
    run.play(6, version=1, rewards=REWARDS)
    run.go_live(3)
    run.step(6)
    return run


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    """Each test leaves its log as it found it."""
    return play(PlayedRun(tmp_path_factory.mktemp("falsified"), "trainer.max_lag=1"))


def ask(run: PlayedRun, folder: Path, *, weights: bool) -> AuditReport:
    """The audit of the run with the checkpoints in that folder."""
    store = FsspecCheckpointStore(str(folder), RUN, fsync=False)
    report = audit(run.run_log(), rules_from_configs([run.config], run.rules().advantages), store)
    if not weights:
        return report
    rules = RecomputeRules(rows=ALL, seed=0, behaviour_tolerance=lambda dtype: 1e-4, scores_tolerance=1e-4)
    return recompute(report, run.run_log(), store, open_scorer, rules)


def open_scorer(directory: Path) -> Rescorer:
    """As `driftlog audit` opens it."""
    return Rescorer(directory, dtype="float32", micro_batch_tokens=256, logprob_chunk=512)


@contextmanager
def undone(log: MemoryLog) -> Iterator[None]:
    """What is done to the log inside is undone."""
    saved = [(held, list(held.entries), [entry.record for entry in held.entries]) for held in log.partitions()]
    try:
        yield
    finally:
        for held, entries, records in saved:
            held.entries[:] = entries
            for entry, record in zip(entries, records, strict=True):
                entry.record = record


def test_the_run_as_it_is_has_no_error_and_its_numbers_are_computed_again(played: PlayedRun) -> None:
    report = ask(played, played.world.directory, weights=True)

    assert report.errors == 0, report.text()
    assert report.ended
    assert report.counts["advantages_recomputed"] > 0
    section = report.sections["recompute"]
    assert (section["trajectories"], section["not_checked"]) == (report.counts["rows_trained"], {})
    assert set(section["behaviour"]) == {"0", "1"}
    assert set(section["scores"]) == {"0", "1", "2"}
    differences = [one["max_difference"] for kind in ("behaviour", "scores") for one in section[kind].values()]
    assert max(differences) < 1e-5


@pytest.mark.parametrize("case", FALSIFICATIONS, ids=[f"{one.where}: {one.what}" for one in FALSIFICATIONS])
def test_the_audit_names_what_was_changed(played: PlayedRun, tmp_path: Path, case: Falsification) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(played.world.directory, folder)
    with undone(played.log):
        case.change(Forge(played), folder)  # type: ignore[arg-type]

        report = ask(played, folder, weights=case.weights)

    assert case.names in errors_of(report).get(case.check, ""), report.text()
    if case.weights:
        assert [check for check in errors_of(report) if check != case.check] == [], report.text()


def test_there_are_more_than_twenty_and_the_documentation_lists_them() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "audit.md").read_text()

    assert len(FALSIFICATIONS) >= 20
    assert len({(one.where, one.what) for one in FALSIFICATIONS}) == len(FALSIFICATIONS)
    assert "\n".join(table()) in page
