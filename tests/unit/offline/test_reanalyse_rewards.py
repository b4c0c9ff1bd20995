"""Rewards judged anew over a log, log-probabilities of other weights, and what is written of it all."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from consumers.offline.reanalyse import Reanalysis
from consumers.offline.reanalyse.report import JsonWriter, ParquetWriter, finite, step_line, totals_dict, totals_lines
from consumers.offline.reanalyse.rewards import RewardsAnew
from consumers.offline.reanalyse.scoring import Rescorer
from driftlog.reanalysis_rules import JUDGED_BY, changed_config, split_reward
from infra.config import load_config
from infra.ports import Completion
from infra.reward_loading import load_reward
from infra.rewards import GuardedReward
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest
from tests.fakes.played_run import PlayedRun
from tests.fakes.policy_rows import moved_directory, tiny_directory

VARIED = (2.0, 0.0, 1.0, 0.5)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    """Two versions, the second of lag 1; the second group has kept no text. Nobody changes it."""
    run = PlayedRun(tmp_path_factory.mktemp("played"), "trainer.max_lag=1", versions=2)
    run.play(0, version=0, rewards=VARIED)
    run.send(run.sample(1, version=0, rewards=VARIED, text=None))
    run.step(8)
    run.go_live(1)
    run.play(2, 3, version=0, rewards=VARIED)
    assert len(run.steps()) == 2
    return run


def anew(run: PlayedRun, reward: GuardedReward) -> tuple[Reanalysis, RewardsAnew]:
    """Through the run with another reward."""
    log = run.run_log()
    rewards = RewardsAnew(log, reward, lambda tokens: run.policy.decode_all([list(tokens)])[0])
    reanalysis = Reanalysis(log, run.segments(), rewards=rewards)
    return reanalysis, rewards


def test_a_changed_reward_is_run_over_the_log_and_changes_the_advantages(played: PlayedRun) -> None:
    def by_index(request: PromptRequest, completion: Completion) -> tuple[float, dict[str, float]]:
        return float(completion.index_in_group), {}

    reanalysis, rewards = anew(played, GuardedReward("index@1", by_index))
    steps = list(reanalysis.steps())

    assert rewards.scored == 16
    assert rewards.changed == 16
    assert [1.5, 1.5] == [step.again["critic/rewards/mean"] for step in steps]
    assert [0.875, 0.875] == [step.logged["critic/rewards/mean"] for step in steps]
    assert math.isclose(steps[0].again["critic/advantages/max"], 1.5 / (math.sqrt(5 / 3) + 1e-4), rel_tol=1e-6)
    assert not reanalysis.totals.reproduction.failed  # the run's own rewards still repeat it
    assert steps[1].again["mismatch/raw_ess"] == steps[1].logged["mismatch/raw_ess"]


def test_text_that_was_not_kept_is_decoded_by_the_runs_tokenizer(played: PlayedRun) -> None:
    seen: dict[tuple[str, int], str | None] = {}

    def look(request: PromptRequest, completion: Completion) -> tuple[float, dict[str, float]]:
        assert request.group_id == completion.group_id
        assert {"numbers", "target"} <= request.reference.keys()
        seen[completion.group_id, completion.index_in_group] = completion.text
        return float(len(completion.text or "")), {}

    reanalysis, _ = anew(played, GuardedReward("length@1", look))
    list(reanalysis.steps())

    kept = {row.group_id: row for row in played.sample(1, version=0)}
    group = next(iter(kept))
    expected = {(group, row.index_in_group): row.text for row in played.sample(1, version=0)}
    assert expected == {place: text for place, text in seen.items() if place[0] == group}


def test_a_reward_that_fails_is_a_failure_and_takes_its_group_out(played: PlayedRun) -> None:
    def often_fails(request: PromptRequest, completion: Completion) -> tuple[float, dict[str, float]]:
        if request.request_position == 0 and completion.index_in_group > 0:
            raise ValueError("no judge for this one")
        return float(completion.index_in_group % 2), {}

    reanalysis, rewards = anew(played, GuardedReward("often@1", often_fails))
    steps = list(reanalysis.steps())

    assert {"ValueError: no judge for this one": 3} == dict(rewards.failed)
    assert {"scored": 16, "failed": 3}.items() <= reanalysis.totals.rewards.items()
    assert "  3 x ValueError: no judge for this one" in totals_lines(reanalysis.totals)
    assert {"reward_failed": 4} == dict(steps[0].reanalysed.rows_dropped)
    assert 4 == steps[0].reanalysed.rows_trained
    assert 1.0 == steps[0].again["dropped/reward_failed"] / 4


def test_a_function_of_ones_own_comes_from_a_file_and_its_folder_is_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_beside.py").write_text("VALUE = 3.5\n")
    (tmp_path / "mine.py").write_text(
        "import mine_beside\n\ndef score(request, completion):\n    return mine_beside.VALUE\n"
    )
    before = list(sys.path)

    reward = load_reward(f"{tmp_path}/mine.py:score")

    assert before == sys.path[: len(before)]
    assert str(tmp_path) == sys.path[-1]
    assert reward.name.startswith(f"{tmp_path}/mine.py:score@")
    assert len(reward.name.rpartition("@")[2]) == 12


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", r"use one of countdown, .*package.module:function"),
        ("no.such.module:f", r"no.such.module cannot be imported: ModuleNotFoundError"),
        ("infra.rewards:nothing", r"infra.rewards has no function 'nothing'"),
        ("nowhere.py:f", r"nowhere.py cannot be imported: FileNotFoundError"),
    ],
)
def test_a_reward_that_is_not_there_is_named(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_reward(name)


def test_the_shipped_alternative_gives_something_for_an_answer_that_can_be_read(played: PlayedRun) -> None:
    request = next(iter(played.requests()))
    numbers = request.reference["numbers"].split(",")
    completion = Completion(
        group_id=request.group_id, index_in_group=0, token_ids=request.prompt_token_ids,
        logprobs=request.prompt_token_ids.astype("float32"), segments=(), finish_reason="stop", text="",
        started_at_us=0, finished_at_us=0,
    )  # fmt: skip

    def score(text: str | None) -> float | None:
        return load_reward("countdown-partial").score(request, [replace(completion, text=text)])[0].value

    assert 0.0 == score("++")
    assert 0.1 == score(numbers[0] + "+" + numbers[0] + "+" + numbers[0])
    assert score(None) is None


# ---------------------------------------------------------------------- other weights


def test_the_weights_of_the_step_give_its_own_scores_again_and_others_do_not(played: PlayedRun, tmp_path: Path) -> None:
    def raw_k3(directory: Path) -> list[float]:
        rescorer = Rescorer(directory, dtype="float32", micro_batch_tokens=64, logprob_chunk=2048)
        reanalysis = Reanalysis(played.run_log(), played.segments(), rescorer=rescorer)
        found = [step.again["mismatch/raw_k3"] for step in reanalysis.steps()]
        assert 16 == rescorer.scored
        return found

    same = raw_k3(tiny_directory())
    other = raw_k3(moved_directory(tmp_path / "moved", 5))

    assert max(same) < 1e-9  # every row was sampled by version 0
    assert min(other) > 1e-4


def test_a_model_with_another_tokenizer_is_refused(played: PlayedRun, tmp_path: Path) -> None:
    copy = moved_directory(tmp_path / "other", 1)
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    rescorer = Rescorer(copy, dtype="float32", micro_batch_tokens=64, logprob_chunk=2048)

    with pytest.raises(ConfigError, match=r"its tokenizer is not the one .* was sampled with"):
        list(Reanalysis(played.run_log(), played.segments(), rescorer=rescorer).steps())


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_lagg=1", r"unknown key trainer.max_lagg; the nearest is trainer.max_lag"),
        (
            "trainer.learning_rate=1.0",
            r"a log cannot tell what it would have changed; reanalyse judges by trainer.max_",
        ),
        ("objective.overrides.correction=token_tis", r"denominator behaviour"),
        ("trainer.stale_action=down_weight", r"without trainer.hard_max_lag"),
        ("max_lag=1", r"write it as section.key=value"),
    ],
)
def test_a_setting_that_cannot_be_judged_is_refused(played: PlayedRun, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        played.rules(override)


def test_settings_that_pace_a_run_do_not_stand_in_the_way_of_a_question() -> None:
    config = load_config(
        None,
        [
            "trainer.max_lag=3",
            "trainer.run_ahead=1",
            "replay.steps=2",
            "replay.groups_per_step=1",
            "checkpoints.keep=5",
        ],
    )

    assert 0 == changed_config(config, ["trainer.max_lag=0"]).trainer.max_lag
    assert 9 == changed_config(config, ["trainer.max_lag=9"]).trainer.max_lag
    weighted = load_config(None, ["trainer.stale_action=down_weight", "trainer.hard_max_lag=4"])
    assert 2 == changed_config(weighted, ["trainer.stale_action=drop"]).trainer.largest_lag


def test_the_reward_is_taken_out_of_the_settings() -> None:
    assert (["trainer.max_lag=1"], "a.b:c") == split_reward(["task.reward=a.b:c", "trainer.max_lag=1"])
    assert ([], "countdown-partial") == split_reward(['task.reward="countdown-partial"'])
    assert ("task.reward" in JUDGED_BY) is True


# ---------------------------------------------------------------------- what is written


def test_json_and_parquet_hold_both_sides_of_every_version(played: PlayedRun, tmp_path: Path) -> None:
    reanalysis = Reanalysis(played.run_log(), played.segments("trainer.max_lag=0"))
    text = io.StringIO()
    writers = [
        JsonWriter(text.write, {"run": "sim", "notes": ["n"]}),
        ParquetWriter(tmp_path / "o.parquet", {"run": "x"}),
    ]
    lines = []
    for step in reanalysis.steps():
        lines.append(step_line(step))
        for writer in writers:
            writer.add(step)
    for writer in writers:
        writer.close(reanalysis.totals)

    found = json.loads(text.getvalue())
    assert ["run", "notes", "versions", "totals"] == list(found)
    assert [1, 2] == [version["version"] for version in found["versions"]]
    assert found["totals"] == json.loads(json.dumps(finite(totals_dict(reanalysis.totals))))
    assert found["totals"]["reproduction"]["reproduced"] is True
    assert 8 == found["totals"]["changes_sides"]["newly_dropped"]["rows"]
    table = pq.read_table(tmp_path / "o.parquet")
    rows = {(r["version"], r["quantity"]): (r["recorded"], r["reanalysed"]) for r in table.to_pylist()}
    assert (8.0, 0.0) == rows[2, "rows/trained"]
    assert (0.0, 8.0) == rows[2, "rows/dropped/stale"]
    assert rows[2, "mismatch/raw_ess"][1] is None
    assert {b"run": b"x"}.items() <= table.schema.metadata.items()
    assert "rows 8 -> 0  dropped 0 -> 8" in lines[1]
    words = "\n".join(totals_lines(reanalysis.totals))
    assert "rows trained 16 -> 8" in words
    assert "newly_dropped/stale: 8 rows" in words
    assert "0 differ" in words


def test_numbers_that_json_cannot_write_become_null() -> None:
    assert {"a": None, "b": [None, 1.0]} == finite({"a": math.nan, "b": (math.inf, 1.0)})
