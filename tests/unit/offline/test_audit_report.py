"""The report of an audit: what it counts, keeps, shows and leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.offline.audit import CHECKS
from consumers.offline.audit.checks import COMPARED
from consumers.offline.audit.report import Findings
from consumers.offline.outcomes import version_of
from schemas.errors import UsageError
from schemas.ledger import StepCompleted
from tests.fakes.scored_run import ScoredRun
from tests.fakes.tiny_forge import Forge, errors_of

FIRST = "tiny/p000000/e0/a0"


def test_the_report_counts_all_and_keeps_few(tmp_path: Path) -> None:
    findings = Findings()
    for number in range(50):
        findings.error("G3.proof", f"t{number}", "no proof", version=number)

    assert len(findings.kept) == 20
    assert findings.occurrences.total() == 50


def damage_checkpoint(run: ScoredRun) -> None:
    """One bit of the weights of version 2."""
    path = run.store_root / "tiny" / "a002" / "model.safetensors"
    path.chmod(0o600)
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def test_a_report_can_be_narrowed_to_one_version(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    damage_checkpoint(run)
    report = run.audit()

    assert report.about_version(2).errors == 1
    assert report.about_version(1).errors == 0
    assert '"store.checkpoint"' in report.to_json()
    assert "1 errors, 0 notices" in report.text()


def test_every_check_says_how_much_it_compared(tmp_path: Path) -> None:
    evidence = ScoredRun(tmp_path).audit().evidence()

    assert set(COMPARED) == set(CHECKS)
    idle = {one["check"] for one in evidence if not one["compared"]}
    assert idle == {"G1.replay"}
    assert {one["what"] for one in evidence if one["check"] == "G1.advantage"} == {"advantages recomputed"}


def test_the_report_shows_families_or_every_check(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    damage_checkpoint(run)
    report = run.audit()

    assert "store the checkpoint store" in report.text()
    assert "3 checks, 1 errors, 0 notices" in report.text()
    assert "ERROR  store.checkpoint" in report.text(every_check=True)
    assert "ok     G5.scores" in report.text(every_check=True)


def test_an_audit_of_one_version_keeps_what_its_transaction_and_its_events_say(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    forge = Forge(run)
    forge.edit_decisions(1, lambda rows: [r for r in rows if r.trajectory_id or r.group_id != FIRST])
    step = next(t.control for t in run.run_log().transactions() if version_of(t.control) == 2)
    assert step is not None
    forge.edit_control(StepCompleted, 1, position=step.position.model_copy(update={"open_groups": ()}))

    about = {version: run.audit(version=version) for version in (1, 2, 3)}

    assert "G1.group_mismatch" in errors_of(about[1])
    assert set(errors_of(about[2])) == {"G5.position"}
    assert "left the open set" in errors_of(about[2])["G5.position"]
    assert "G1.group_mismatch" not in errors_of(about[3])
    with pytest.raises(UsageError, match=r"--version 9: run tiny has versions 0 to 3"):
        run.audit(version=9)


def test_the_documentation_names_every_check() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "audit.md").read_text()

    assert [name for name in CHECKS if f"`{name}`" not in page] == []
