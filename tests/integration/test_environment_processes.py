"""An environment of one's own in a process: it may crash, hang or lie, and costs at most its own episode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.config_task import EnvironmentEntry
from infra.environment import Ask, Outcome
from infra.reward_processes import ProcessEnvironment, RewardProcessSettings
from schemas.errors import ConfigError
from tests.unit.policy.test_rewards import request

LIMIT_S = 30.0
CODE = """
import os, random
from driftlog.multi_turn import Turn

class Own:
    def __init__(self, factor=1.0): self.factor, self.turns = factor, 0
    def reset(self, start): self.word = start.request.reference["answer"]
    def step(self, text):
        self.turns += 1
        if text == "exit": os._exit(7)
        if text == "loop":
            while True: pass
        if text == "print": print("noise", flush=True)
        if text == "random": return Turn(observation=str(random.random()))
        if text == self.word: return Turn(done=True, reward=self.factor / self.turns)
        return Turn(observation=f"turn {self.turns}")

class Patient(Own):
    async def step(self, text): return super().step(text)
"""


@contextmanager
def environment(
    tmp_path: Path, name: str = "Own", timeout_s: float = 10.0, **arguments: float
) -> Iterator[ProcessEnvironment]:
    code = tmp_path / "own_world.py"
    code.write_text(CODE)
    entry = EnvironmentEntry(name=f"{code}:{name}", arguments=dict(arguments))
    made = ProcessEnvironment(RewardProcessSettings(environment=entry, processes=1, timeout_s=timeout_s))
    try:
        yield made
    finally:
        made.close()


def ask(member: int, *texts: str) -> Ask:
    said = ("", *(f"turn {number}" for number in range(1, len(texts))))[: len(texts)]
    return Ask(request=request(answer="x"), member=member, seed=7, texts=texts, observations=said)


def answers(at: ProcessEnvironment, *asks: Ask) -> Sequence[Outcome]:
    return at.ask(asks).result(LIMIT_S)


def test_a_process_that_is_killed_loses_no_episode_since_every_question_plays_it_from_the_beginning(
    tmp_path: Path,
) -> None:
    with environment(tmp_path, "Patient", factor=2.0) as at:
        [opening, first] = answers(at, ask(0), ask(1, "print"))
        at.processes[0].end()
        [second] = answers(at, ask(1, "a", "x"))

    assert ("", "turn 1") == (opening.observation, first.observation)
    assert (True, 1.0, {"turns": 2.0}) == (second.done, second.reward.value, second.reward.parts)
    assert f"{tmp_path / 'own_world.py'}:Patient" in at.name


def test_what_user_code_does_wrong_fails_that_episode_alone(tmp_path: Path) -> None:
    with environment(tmp_path, timeout_s=0.5) as at:
        [before, crashed, after] = answers(at, ask(0, "x"), ask(1, "exit"), ask(2, "x"))
        [hung, random, again] = answers(at, ask(0, "loop"), ask(1, "random", "a"), ask(2, "x"))

    assert [1.0, 1.0, 1.0] == [outcome.reward.value for outcome in (before, after, again)]
    assert "crash: the environment ended its process with exit code 7" == crashed.reward.error
    assert "time-out: the environment took longer than 0.5 s" == hung.reward.error
    assert "not repeatable" in str(random.reward.error)


def test_an_environment_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    words = r"task.environment: environment .* has no function 'Absent'"
    with pytest.raises(ConfigError, match=words), environment(tmp_path, "Absent"):
        pass
