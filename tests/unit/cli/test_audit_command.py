"""What `driftlog audit` adds to an audit when it is asked to, and what it refuses; and its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from consumers.offline.mirror import Difference
from driftlog.__main__ import main
from driftlog.commands import audit as command
from driftlog.mirroring import MirrorReport
from driftlog.run_reading import OpenedRun
from schemas.errors import TrackerUnavailable
from tests.fakes.scored_run import ScoredRun
from tests.fakes.tiny_forge import errors_of, notices_of


class _Opened:
    config: Any = None


def _asked(monkeypatch: pytest.MonkeyPatch, folder: Path, answer: Callable[[], MirrorReport]) -> Any:
    monkeypatch.setattr("driftlog.mirroring.compare_with_mlflow", lambda at, settings: answer())
    monkeypatch.setattr("driftlog.mirroring.mlflow_settings", lambda config: None)
    return command._with_mirror(cast(OpenedRun, _Opened()), ScoredRun(folder).audit())


def _mirror(*differences: Difference, behind: int = 0, running: bool = False) -> Callable[[], MirrorReport]:
    return lambda: MirrorReport(
        mlflow_run="abc", entries=500, differences=differences, records_behind=behind, is_running=running
    )


def test_an_entry_that_is_not_what_the_log_says_is_an_error_of_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = Difference(entry="version/2/tag/depth", expected="2", actual="9")

    report = _asked(monkeypatch, tmp_path, _mirror(edited))

    assert errors_of(report) == {"mlflow.mirror": "version/2/tag/depth: version/2/tag/depth: '9', the log says '2'\n"}
    assert (report.counts["mlflow_entries"], report.checks[-1]) == (500, "mlflow.mirror")


def test_an_mlflow_that_is_behind_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _asked(monkeypatch, tmp_path, _mirror(behind=3))

    assert (report.errors, notices_of(report)) == (0, {"mlflow.mirror"})
    assert "3 records behind the log" in report.text()


def test_an_mlflow_that_refuses_is_one_error_beside_the_rest_of_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> MirrorReport:
        raise TrackerUnavailable("the server refuses the host")

    report = _asked(monkeypatch, tmp_path, refuse)

    assert errors_of(report) == {"mlflow.mirror": "MLflow: the server refuses the host\n"}
    assert report.counts["rows_trained"] == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "--recompute", "0"], "--recompute 0: at least 1 row"),
        (["lineage", "--dot", "--json"], "it goes without --version and --json"),
        (["diff", "no/where", "x"], "no/where: no run lies there"),
        (["diff", "a", "b", *["--directory", "c"] * 3], "--directory is given 3 times"),
    ],
)
def test_what_makes_no_sense_is_one_message_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert words in said
