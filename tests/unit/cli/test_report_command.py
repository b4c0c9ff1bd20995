"""driftlog report: where it writes, and what it does when a part beside the log is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from driftlog.__main__ import main
from driftlog.commands import report
from infra.config import Config
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """A run on the memory log, in the place of the one that --run names."""
    run = TinyRun(tmp_path / "store")
    at = SimpleNamespace(
        log=run.run_log, store=lambda: run.store, configs=lambda: [Config()],
        run=SimpleNamespace(summary=tmp_path / "summary.json"),
    )  # fmt: skip

    @contextmanager
    def opened_run(options: Any) -> Iterator[Any]:
        yield at

    monkeypatch.setattr(report, "opened_run", opened_run)
    return run


def test_it_writes_one_file_whole_and_says_what_is_in_it(
    tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text(
        '{"held_out_greedy_success_before": 0.25, "held_out_greedy_success_after": 0.5}'
    )
    out = tmp_path / "tiny.html"
    out.write_text("old")

    assert main(["report", "--out", str(out), "--no-audit", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["bytes"]) == ("ended", out.stat().st_size)
    assert told["figures"] > 15
    text = out.read_text(encoding="utf-8")
    assert text.endswith("</html>\n")
    assert "held out, greedy: 0.25 to 0.50" in text
    assert [path.name for path in tmp_path.glob("*html*")] == ["tiny.html"]


def test_weights_that_are_gone_and_a_run_that_does_not_add_up_are_said_in_the_report(
    tiny: TinyRun, tmp_path: Path
) -> None:
    forge = Forge(tiny)
    trained = {row.trajectory_id for _, row in forge.trained()}
    forge.edit_decisions(1, lambda rows: [row for row in rows if row.trajectory_id != min(map(str, trained))])
    shutil.rmtree(tiny.store_root)
    out = tmp_path / "tiny.html"

    assert main(["report", "--out", str(out), "--no-audit", "--no-text"]) == 0

    text = out.read_text(encoding="utf-8")
    assert "The run does not add up: run tiny: 14 trajectories in the log" in text
    assert "The manifest of version 3 cannot be read" in text


@pytest.mark.parametrize(("name", "words"), [(".", "is a folder"), ("no/such/report.html", "there is no folder")])
def test_a_bad_target_is_refused_before_anything_is_read(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--out", str(tmp_path / name), "--directory", str(tmp_path)]) == 2

    assert words in capsys.readouterr().err
