"""How a configuration becomes the evaluator's questions, and what `up` does with an evaluator that ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftlog.launch import EVALUATOR, TRAINER, Interrupts, RunFailed, RunFailedForGood, _Launch
from driftlog.processes import Child, Processes, Program
from driftlog.run_directory import RunDirectory
from driftlog.view import View
from driftlog.wiring_evaluation import asks_of, evaluation_prompts
from infra.config import Config, parse_config
from infra.countdown import problems
from schemas.errors import ConfigError
from tests.fakes.policy_rows import tiny_directory


def _config(**evaluation: object) -> Config:
    return parse_config({"evaluation": evaluation}, "test")


def _asked(**evaluation: object) -> list[str]:
    prompts = evaluation_prompts(_config(**evaluation), lambda text: [len(text)], Path("no such directory"))
    assert [prompt.index for prompt in prompts] == list(range(len(prompts)))
    return [prompt.prompt_id for prompt in prompts]


def test_prompts_are_asked_greedily_and_by_samples_up_to_the_models_end() -> None:
    greedy, sampled = asks_of(_config(samples_per_prompt=8, temperature=0.5), 17)

    assert (greedy.samples, greedy.sampling.temperature, greedy.sampling.stop_token_ids) == (1, 0.0, (17,))
    assert (sampled.samples, sampled.sampling.temperature, sampled.sampling.max_tokens) == (8, 0.5, 8)
    assert [ask.samples for ask in asks_of(_config(samples_per_prompt=0), 1)] == [1]
    assert [ask.samples for ask in asks_of(_config(greedy=False), 1)] == [4]


def test_nothing_to_ask_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.greedy = false and evaluation\.samples_per_prompt = 0"):
        _config(greedy=False, samples_per_prompt=0)


def test_held_out_problems_are_asked_unless_others_are_named() -> None:
    held_out = [problem.prompt_id for problem in problems() if problem.held_out]
    trained = [problem.prompt_id for problem in problems() if not problem.held_out]

    assert _asked() == held_out
    assert _asked(prompts="trained") == trained
    assert _asked(prompts="all") == [*held_out, *trained]
    assert _asked(max_prompts=3) == held_out[:3]


def test_held_out_prompts_of_your_own_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    for name, prompts in (("trained", ("1,2=", "3,4=")), ("held_out", ("5,6=",))):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"prompt": "{text}", "id": "{text}"}}\n' for text in prompts)
        )
    config = parse_config(
        {
            "task": {"kind": "prompts", "prompts": str(tmp_path / "trained.jsonl"), "mixture": {"default": 3}},
            "evaluation": {"file": str(tmp_path / "held_out.jsonl"), "prompts": "all"},
        },
        "test",
    )

    found = evaluation_prompts(config, lambda text: [0], tiny_directory())

    assert [(prompt.index, prompt.prompt_id) for prompt in found] == [(0, "5,6="), (1, "1,2="), (2, "3,4=")]


@pytest.mark.parametrize(
    ("task", "evaluation", "word"),
    [
        ({}, {"file": "x.jsonl"}, 'goes with task.kind = "prompts"'),
        ({"kind": "prompts", "prompts": "x.jsonl"}, {"enabled": True}, "needs evaluation.file"),
    ],
)
def test_a_file_and_the_task_must_go_together(
    task: dict[str, object], evaluation: dict[str, object], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_config({"task": task, "evaluation": evaluation}, "test")


def test_an_evaluator_that_is_started_alone_names_the_missing_file() -> None:
    config = parse_config({"task": {"kind": "prompts", "prompts": "x.jsonl"}}, "test")

    with pytest.raises(ConfigError, match=r"evaluation\.file names no held-out prompts"):
        evaluation_prompts(config, lambda text: [0], tiny_directory())


def test_evaluation_may_change_when_a_run_is_resumed_and_decides_no_weights() -> None:
    assert _config(enabled=True, every_versions=2).digest() == Config().digest()


class _Said(View):
    """Keeps the words."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def say(self, words: str) -> None:
        self.words.append(words)


def _launch(directory: Path, **evaluation: object) -> tuple[_Launch, _Said]:
    run, view = RunDirectory(directory, "demo"), _Said()
    run.adopt(_config(**evaluation), accept_changes=False)
    launched = _Launch(_config(**evaluation), run, Processes(run), view, Interrupts(), None, resuming=False)
    return launched, view


def _ended(name: str, code: int, deaths: int = 0) -> Child:
    return Child(Program(name=name, arguments=()), exit_code=code, deaths_s=[0.0] * deaths)


def test_an_evaluator_is_started_only_where_it_is_asked_for(tmp_path: Path) -> None:
    off, on = _launch(tmp_path / "off")[0], _launch(tmp_path / "on", enabled=True, threads=2)[0]

    assert EVALUATOR not in [program.name for program in off._programs()]
    (program,) = [program for program in on._programs() if program.name == EVALUATOR]
    assert (program.arguments[0], program.threads, program.niceness) == ("evaluate", 2, 19)


@pytest.mark.parametrize(("code", "deaths"), [(2, 0), (3, 0), (1, 5)])
def test_an_evaluator_that_cannot_go_on_stops_nothing(tmp_path: Path, code: int, deaths: int) -> None:
    launched, view = _launch(tmp_path, enabled=True)

    launched._judge(_ended(EVALUATOR, code, deaths), 1.0)

    assert view.words == ["evaluator gave up; training goes on. it logged nothing"]


def test_an_evaluator_that_died_is_started_again(tmp_path: Path) -> None:
    launched, _ = _launch(tmp_path, enabled=True)
    child = _ended(EVALUATOR, -9)

    launched._judge(child, 1.0)

    assert child.restart_at_s == 1.25


def test_a_trainer_that_cannot_go_on_stops_the_run(tmp_path: Path) -> None:
    launched, _ = _launch(tmp_path)

    with pytest.raises(RunFailedForGood):
        launched._judge(_ended(TRAINER, 2), 1.0)
    with pytest.raises(RunFailed, match="another trainer took over"):
        launched._judge(_ended(TRAINER, 3), 1.0)
