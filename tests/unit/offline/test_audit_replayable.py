"""G6 in the audit: what a step names, what its checkpoint says, and which steps can be trained again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from consumers.offline.audit import audit
from consumers.offline.audit.index import RunIndex, read_index
from consumers.offline.audit.replayable import Stored, check_replayable
from consumers.offline.audit.report import Findings
from schemas import policy_events as ev
from schemas.checkpoint import ManifestFile
from schemas.ledger import StepCompleted
from tests.fakes.scored_run import ScoredRun
from tests.fakes.tiny_forge import Forge, errors_of
from tests.fakes.tiny_run import RULES
from tests.fakes.tiny_values import RUN, manifest

STATE = ManifestFile(name="trainer_state.json", bytes=2, sha256="")


def _checked(index: RunIndex, version: int, **changes: Any) -> list[str]:
    """What is said of that version when its manifest reads otherwise."""
    good = manifest(f"a{version}", version).model_copy(update={"files": (STATE,)})
    rng_digest = changes.pop("rng_digest", None)
    findings = Findings()
    at = {version: Stored(manifest=good.model_copy(update=changes), rng_digest=rng_digest)}
    check_replayable(index, at, findings)
    assert {(finding.check, finding.subject) for finding in findings.kept} <= {("G6.replayable", f"version {version}")}
    return [finding.message for finding in findings.kept]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> RunIndex:
    return read_index(ScoredRun(tmp_path_factory.mktemp("replayable")).run_log())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"library_versions": {}, "threads": 0}, ["its manifest does not name: library versions, threads"]),
        ({"device_type": "", "logprob_chunk": 0}, ["its manifest does not name: device type, log-probability chunk"]),
        ({"ranks": 0}, ["its manifest does not name: ranks"]),
        ({"has_state": False}, ["published with optimizer and RNG state, saved without it by its manifest"]),
        ({"files": ()}, ["its manifest says that it has state, and lists no trainer_state.json"]),
        (
            {"code_revision": "git:b"},
            ["code_revision is 'r' in its StepCompleted, 'git:b' in the manifest of what it made"],
        ),
        (
            {"config_digest": "c"},
            ["config_digest is 'c0nf19' in its StepCompleted, 'c' in the manifest of what it made"],
        ),
        ({"rng_digest": "another"}, ["RNG state rng... in its StepCompleted, another... in what it saved"]),
        ({"rng_digest": "rng"}, []),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(index: RunIndex, changes: dict[str, Any], words: list[str]) -> None:
    assert _checked(index, 1, **changes) == words


def test_the_first_version_is_asked_for_its_environment_too(index: RunIndex) -> None:
    assert _checked(index, 0, threads=0) == ["its manifest does not name: threads"]


def test_a_step_that_names_no_rng_state_is_an_error_without_a_store_too(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    Forge(run).edit_control(StepCompleted, 1, rng_digest="")

    report = audit(run.run_log(), RULES)

    assert errors_of(report) == {"G6.replayable": "version 2: its StepCompleted names no rng_digest\n"}


def test_a_healthy_run_says_that_each_step_can_be_trained_again(tmp_path: Path) -> None:
    report = ScoredRun(tmp_path).audit()

    assert (report.errors, report.notices) == (0, 0)
    assert report.counts["steps_replayable"] == report.counts["steps"] == 3


def test_a_start_that_retention_removed_is_counted_and_no_finding(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    run.append_event(ev.VersionRetired(run=RUN, at_us=run.clock.now_us(), version=0, rule="keep=3"))

    report = run.audit()

    assert "G6.replayable" not in errors_of(report)
    assert (report.counts["steps"], report.counts["steps_replayable"]) == (3, 2)


def test_a_start_without_state_is_reached_through_the_steps_before_it(index: RunIndex) -> None:
    without = {
        number: state if number == 0 else dataclasses.replace(state, event=_without_state(state.event))
        for number, state in index.fold.versions.items()
    }
    for kept, replayable in ((without, 3), ({**without, 0: dataclasses.replace(without[1])}, 0)):
        fold = type("Fold", (), {"versions": kept})
        counts = check_replayable(dataclasses.replace(index, fold=fold), None, Findings())
        assert counts["steps_replayable"] == replayable


def test_a_branch_start_stands_on_the_state_it_repeats(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    published = next(e.event for e in run.run_log().policy() if getattr(e.event, "version", None) == 1)
    index = read_index(run.run_log())
    for version, parent, depth in ((9, 1, 1), (10, 9, 2)):
        event = published.model_copy(update={"version": version, "parent": parent, "depth": depth})
        state = dataclasses.replace(index.fold.versions[1], event=event)
        index.fold.versions[version] = state
    step = index.steps()[-1][0]
    assert step.control is not None
    made = dataclasses.replace(step, control=step.control.model_copy(update={"version_in": 9, "version_out": 10}))
    index.transactions.append(made)

    assert check_replayable(index, None, Findings())["steps_replayable"] == 4


def _without_state(event: ev.VersionPublished) -> ev.VersionPublished:
    return event.model_copy(update={"has_state": False})
