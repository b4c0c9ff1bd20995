"""Evaluations in summary and status: first, best, newest; a version counts once."""

from __future__ import annotations

from pathlib import Path

from consumers.offline.evaluations import evaluated_run
from consumers.offline.status import status
from consumers.offline.summary import summarise
from driftlog.finish import summary_text
from infra.ports import Message
from schemas.evaluation_codec import EvaluationRow, encode_evaluation, evaluation_headers
from schemas.topics import TopicName, topic
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN


def _evaluate(run: TinyRun, version: int, greedy: float, *sampled: float) -> None:
    rows = [
        EvaluationRow(
            version=version, task="t", prompt_id="p", sample=max(0, i - 1), temperature=float(i > 0), reward=reward,
            reward_error=None, completion_tokens=3, finish_reason="stop", evaluated_at_us=5,
        )
        for i, reward in enumerate((greedy, *sampled))
    ]  # fmt: skip
    value = encode_evaluation(rows)
    headers = evaluation_headers(rows, value, "evaluator")
    name = topic(RUN, TopicName.EVALUATIONS)
    run.log.append(Message(topic=name, key=b"v", value=value, headers=headers, partition=0))


def test_first_best_and_newest_are_told(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    _evaluate(run, 0, 0.0, 0.0, 0.0)
    _evaluate(run, 2, 1.0, 1.0, 0.0)
    _evaluate(run, 3, 0.5, 0.0, 0.0)

    found = evaluated_run(run.run_log())

    assert (found.versions, found.first["version"], found.best["version"], found.newest["version"]) == (3, 0, 2, 3)
    assert found.best["greedy_reward_mean"] == 1.0
    assert found.best["pass_at_2"] == 1.0
    newest, best = "greedy 0.50, sampled 0.00, pass@2 0.00", "greedy 1.00, sampled 0.50, pass@2 1.00"
    words = f"3 versions; version 3: {newest} (1 prompts); best was version 2: {best} (1 prompts)"
    assert found.words == (words,)


def test_a_version_that_two_evaluators_wrote_counts_once(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    for version in (1, 2, 1):
        _evaluate(run, version, 1.0)

    found = evaluated_run(run.run_log())

    assert (found.versions, found.newest["version"], found.best["version"]) == (2, 2, 2)


def test_summary_and_status_tell_it_and_are_silent_without_an_evaluator(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    before, silent = summarise(run.run_log()).to_dict(), status(run.run_log(), now_us=run.clock.now_us())
    _evaluate(run, 3, 1.0)
    after, told = summarise(run.run_log()).to_dict(), status(run.run_log(), now_us=run.clock.now_us())

    assert (before["evaluation"]["versions"], before["evaluation"]["newest"]) == (0, {})
    assert (after["evaluation"]["versions"], after["evaluation"]["newest"]["greedy_reward_mean"]) == (1, 1.0)
    assert {key: after[key] for key in after if key != "evaluation"} == {
        key: before[key] for key in before if key != "evaluation"
    }
    line = "1 versions; version 3: greedy 1.00 (1 prompts)"
    assert f"evaluation: {line}" in told.text()
    assert "evaluation" not in silent.text()
    assert any(line in words for words in summary_text(after))
    assert run.audit().errors == 0
