"""driftlog plan: the bill is worked out again by hand, and what cannot work is said with its inequality."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from driftlog.__main__ import main
from driftlog.commands.plan import count
from driftlog.sizing import Workload, plan, warnings
from infra.config import Config, parse_config
from schemas.errors import ConfigError

LOAD = Workload(
    parameters=1e9,
    completion_tokens=500,
    prompt_tokens=100,
    tokens_per_s=10_000,
    step_s=4.0,
    write_bytes_per_s=1e9,
    fetch_bytes_per_s=2e9,
)


def config(**sections: dict[str, object]) -> Config:
    """group_size 8, 16 groups a step, everything else as given."""
    return parse_config({"task": {"group_size": 8, "max_tokens": 500}, **sections}, "test")


def test_the_bill_of_a_run_that_is_bound_by_training() -> None:
    found = plan(config(), LOAD)

    assert found.bound_by == "training"
    assert found.version_bytes == 4e9
    assert found.state_bytes == 12e9
    assert found.publish_s == pytest.approx(16.0)
    assert found.step_s == pytest.approx(20.0)  # 4 computing + 16 publishing; generation takes 6.4
    assert found.versions_per_hour == pytest.approx(180)
    assert found.groups_per_hour == pytest.approx(180 * 16)
    assert found.switch_s == pytest.approx(18.0)
    assert found.age_s == pytest.approx(2 * 20.0 + 16.0)  # run_ahead 1
    assert found.trainer_bytes == 16e9
    assert found.store_bytes is None
    assert found.store_bytes_per_hour == pytest.approx(180 * 16e9)
    assert found.log_bytes_per_hour == pytest.approx(found.groups_per_hour * found.group_stored_bytes)
    # 4 bytes a token and a log-probability, the prompt once a row, 1 byte of loss mask: what the codec promises.
    assert 8 * (500 * 8 + 100 * 4) < found.group_bytes < 8 * (500 * 10 + 100 * 4) + 8_000


def test_overlapped_publication_costs_only_what_is_longer() -> None:
    found = plan(config(trainer={"overlap_publication": True}), LOAD)

    assert found.step_s == pytest.approx(16.0)


def test_slow_generators_bound_the_step() -> None:
    found = plan(config(), replace(LOAD, tokens_per_s=1_000))

    assert (found.bound_by, found.step_s) == ("generation", pytest.approx(64.0))


def test_retention_and_rarer_states_bound_the_store() -> None:
    found = plan(config(checkpoints={"keep": 10, "state_every": 4}, model={"dtype": "bfloat16"}), LOAD)

    assert found.store_bytes == pytest.approx(10 * (2e9 + 12e9 / 4))
    assert found.store_bytes_per_hour == 0


@pytest.mark.parametrize(("publish", "version_bytes"), [("merged", 4e9), ("adapter", 4e7)])
def test_adapters_have_small_states_and_where_published_so_small_versions(publish: str, version_bytes: float) -> None:
    adapters = config(lora={"rank": 8, "publish": publish})
    found = plan(adapters, replace(LOAD, adapter_parameters=1e7))

    assert (found.version_bytes, found.state_bytes) == (version_bytes, 1.2e8)
    assert found.trainer_bytes == 4e9 + 1.2e8
    with pytest.raises(ConfigError, match="lora.rank = 8: say how many"):
        plan(adapters, LOAD)


def test_a_plan_that_can_work_has_no_problems() -> None:
    roomy = config(trainer={"group_timeout_s": 300.0}, coordinator={"switch_deadline_s": 120.0})

    assert list(warnings(roomy, LOAD, plan(roomy, LOAD))) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens_per_s": 500}, "trainer.group_timeout_s = 60: groups would be given up"),
        ({"write_bytes_per_s": 1e8}, "coordinator.switch_deadline_s = 90: every switch would fail"),
        ({"fetch_bytes_per_s": 5e7}, "most of what is generated would be too old"),
        ({"tokens_per_s": 1e8, "write_bytes_per_s": 1e13, "step_s": 0.001, "parameters": 1e6}, "a run has 4"),
    ],
)
def test_what_cannot_work_is_said_with_the_way_out(change: dict[str, float], words: str) -> None:
    load = replace(LOAD, **change)  # type: ignore[arg-type]

    assert words in "\n".join(warnings(config(), load, plan(config(), load)))


def test_a_group_that_no_record_can_hold_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="task.group_size = 8 with 300000 completion tokens .* the limit is 16777216"):
        plan(config(), replace(LOAD, completion_tokens=300_000))


ARGUMENTS = ["plan", "--parameters", "1B", "--tokens-per-second", "1e4", "--completion-tokens", "500", "--step-s", "4"]


def test_the_command_prints_words_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--set", "coordinator.switch_deadline_s=300"]) == 0
    words = capsys.readouterr().out
    assert main([*ARGUMENTS, "--set", "coordinator.switch_deadline_s=300", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)

    assert "publishing" in words
    assert data["publish_s"] == pytest.approx(32.0)
    assert data["problems"] == []


def test_the_command_ends_with_1_when_something_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    too_soon = ["--set", "coordinator.switch_deadline_s=30", "--set", "generator.fetch_timeout_s=15"]

    assert main([*ARGUMENTS, *too_soon]) == 1
    assert "every switch would fail" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "-1M", "many", "1T"])
def test_a_wrong_number_of_parameters_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--parameters", text, *ARGUMENTS[3:]])

    assert ended.value.code == 2
    assert "write 135M or 1.7B" in capsys.readouterr().err or text == "-1M"


def test_units_are_thousands() -> None:
    assert [count("5K"), count("1.5m"), count("2B")] == [5e3, 1.5e6, 2e9]
