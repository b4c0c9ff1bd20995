"""What the story of the stack refuses: each promise of the file, broken by a container that is played here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.check import __main__ as check
from deploy.check import story
from deploy.check.compose import Service
from deploy.check.stand_in import CheckFailed


class PlayedContainer:
    """A container of our own image whose exit and health are given."""

    def __init__(self, name: str, folder: Path, *, code: int | None = None, healthy: bool = True, grace: str = "60s"):
        self.name = name
        self.service = Service(name=name, raw={"build": {"target": "cpu"}, "stop_grace_period": grace})
        self.log = folder / "log"
        self.log.write_text("its last words")
        self.healthy_after_s: float | None = None
        self.code = code
        self._healthy = healthy
        self.on_stop: int | None = 0

    def ask(self) -> bool:
        return self._healthy

    def exit_code(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = self.on_stop

    def last_words(self) -> str:
        return self.log.read_text()


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "START_LIMIT_S", 0.0)
    monkeypatch.setattr(story, "RUN_LIMIT_S", 0.0)
    monkeypatch.setattr(story, "POLL_S", 0.0)


def refused(words: str) -> Any:
    return pytest.raises(CheckFailed, match=words)


def test_a_container_that_is_never_healthy_is_named_with_its_last_words(tmp_path: Path) -> None:
    with refused(r"(?s)trainer did not become healthy.*its last words"):
        story._await_condition(PlayedContainer("trainer", tmp_path, healthy=False), "service_healthy")  # type: ignore[arg-type]


def test_a_container_that_ends_before_it_was_healthy_is_named(tmp_path: Path) -> None:
    with refused(r"trainer ended \(1\) before it was healthy"):
        story._await_health([PlayedContainer("trainer", tmp_path, code=1, healthy=False)])  # type: ignore[list-item]


@pytest.mark.parametrize(("code", "words"), [(2, "prepare ended with 2"), (None, "prepare has not completed")])
def test_a_one_shot_that_fails_or_hangs_stops_the_story(tmp_path: Path, code: int | None, words: str) -> None:
    with refused(words):
        story._await_condition(PlayedContainer("prepare", tmp_path, code=code), "service_completed_successfully")  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "words"), [(3, "generator ended with 3"), (None, "generator goes on")])
def test_a_service_that_outlives_the_run_or_ends_badly_is_named(tmp_path: Path, code: int | None, words: str) -> None:
    with refused(words):
        story._await_end([PlayedContainer("generator", tmp_path, code=code)], lambda _: None)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("on_stop", "grace", "words"), [(None, "0s", "generator would be killed"), (1, "60s", "told to stop, ended 1")]
)
def test_a_service_that_does_not_stop_in_good_order_is_named(
    tmp_path: Path, on_stop: int | None, grace: str, words: str
) -> None:
    container = PlayedContainer("generator", tmp_path, grace=grace)
    container.on_stop = on_stop

    with refused(words):
        story._stop([container], lambda _: None)  # type: ignore[list-item]


def test_a_service_that_leaves_a_run_that_goes_on_is_named(tmp_path: Path) -> None:
    class Runs:
        def volume(self, name: str) -> Path:
            return tmp_path

    for number in range(1 + story.VERSIONS + story.GROWN):
        folder = tmp_path / "demo" / "checkpoints" / "demo" / str(number)
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    trainer, generator = PlayedContainer("trainer", tmp_path), PlayedContainer("generator", tmp_path, code=0)

    with refused(r"generator left \(0\) a run that goes on"):
        story._await_growth(Runs(), [trainer, generator], lambda _: None)  # type: ignore[arg-type, list-item]


def test_the_command_ends_with_1_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "static_findings", lambda: ["kafka: no"])
    monkeypatch.setattr(sys, "argv", ["check", "--static", "--tools", str(tmp_path)])

    assert check.main() == 1

    said = capsys.readouterr()
    assert "kafka: no" in said.err
    assert '"dclint": "absent"' in said.out
    assert '"ok": false' in said.out
