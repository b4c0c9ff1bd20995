"""What cannot work is refused in one message: exit 2, no traceback, nothing left running, nothing left behind."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.driving import Site, driftlog, up, up_arguments


@dataclass(frozen=True)
class Bad:
    """One mistake and the words that must name it."""

    settings: tuple[str, ...]
    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


MISTAKES = {
    "unknown-key": Bad(("trainer.max_lagg=2",), ("trainer.max_lagg", "trainer.max_lag")),
    "unknown-section": Bad(("trainr.max_lag=2",), ("trainr", "trainer")),
    "group-size-1": Bad(("task.group_size=1",), ("task.group_size", "2")),
    "keep-too-few": Bad(("checkpoints.keep=3",), ("checkpoints.keep = 3", "max_lag + 2 = 4")),
    "run-ahead-above-lag": Bad(("trainer.run_ahead=3",), ("run_ahead = 3", "max_lag = 2")),
    "bad-run-name": Bad(('run.name="No Spaces"',), ("No Spaces",)),
    "unreachable-broker": Bad(('kafka.bootstrap_servers="127.0.0.1:1"',), ("127.0.0.1:1", "refused")),
    "no-java": Bad((), ("java", "PATH", "kafka.bootstrap_servers"), {"PATH": "/nowhere"}),
    "no-such-model": Bad(('model.init="no/such/model"',), ("no/such/model", "countdown-tiny")),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_and_exit_2(site: Site, mistake: Bad) -> None:
    arguments = up_arguments(site, mistake.settings)
    if any(setting.startswith("run.name") for setting in mistake.settings):
        at = arguments.index("--run")
        del arguments[at : at + 2]

    done = driftlog(*arguments, env=mistake.env)

    _is_one_message(done.returncode, done.stderr, mistake.words)
    assert site.run().stored_config() is None


def test_a_port_in_use_is_named(site: Site) -> None:
    with _listening() as port:
        done = up(site, f"kafka.port={port}")

    _is_one_message(done.returncode, done.stderr, (str(port), "taken"))


def _no_tokenizer(model: Path) -> str:
    (model / "config.json").write_text("{}")
    return "tokenizer.json"


def _no_weights(model: Path) -> str:
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    return "safetensors"


def _torn_weights(model: Path) -> str:
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"torn")
    return "cannot be loaded"


@pytest.mark.parametrize("spoil", [_no_tokenizer, _no_weights, _torn_weights])
def test_a_directory_that_is_no_model_is_refused(site: Site, spoil: Callable[[Path], str]) -> None:
    model = site.folder / "model"
    model.mkdir()
    word = spoil(model)

    done = up(site, f'model.init="{model}"')

    _is_one_message(done.returncode, done.stderr, (str(model), word))
    assert site.run().stored_config() is None


@pytest.mark.parametrize("verb", ["status", "audit", "summary", "samples"])
def test_reading_a_run_that_is_not_there_says_which_there_are(site: Site, verb: str) -> None:
    done = driftlog(verb, "--run", "other", "--directory", str(site.runs))

    _is_one_message(done.returncode, done.stderr, ("other", str(site.runs)))


def _is_one_message(code: int, stderr: str, words: tuple[str, ...]) -> None:
    assert code == 2, stderr
    assert "Traceback" not in stderr
    messages = [line for line in stderr.splitlines() if line.startswith("driftlog: ")]
    assert len(messages) == 1, stderr
    for word in words:
        assert word in messages[0]


@contextmanager
def _listening() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]
