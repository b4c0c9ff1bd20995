"""What a reanalysis needs and the log no longer holds, or holds in a newer form, is one message."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from consumers.offline.reanalyse import Reanalysis, Segment
from consumers.offline.reanalyse.rewards import RewardsAnew
from consumers.offline.run_log import RunLog
from driftlog.commands import reanalyse as command
from infra.rewards import ScoredAtOnce
from schemas.errors import IllegalState, RangeMissing
from schemas.headers import is_arrow
from schemas.topics import TopicName
from tests.fakes.simulated_rules import simulated_rules
from tests.fakes.simulated_run import SimulatedRun
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_policy import ParityReward


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> SimulatedRun:
    return SimulatedRun(tmp_path_factory.mktemp("simulated"), versions=3)


@pytest.fixture
def run(simulated: SimulatedRun) -> Iterator[SimulatedRun]:
    with simulated.restored():
        yield simulated


def _reanalysis(run: SimulatedRun, log: RunLog, rewards: RewardsAnew | None = None) -> Reanalysis:
    own = simulated_rules(run, 2)
    return Reanalysis(log, {"config": Segment(own=own, other=own)}, rewards=rewards)


def _forge(run: SimulatedRun) -> Forge:
    return Forge(run)  # type: ignore[arg-type]


def _refused_at_once(run: SimulatedRun, kind: type[IllegalState]) -> str:
    """The message; it comes with the call, before anybody asks for a step."""
    reanalysis = _reanalysis(run, run.run_log())
    with pytest.raises(kind) as caught:
        reanalysis.steps()
    return str(caught.value)


@pytest.mark.parametrize("name", [TopicName.POLICY, TopicName.LEDGER])
def test_policy_and_ledger_must_be_whole(run: SimulatedRun, name: TopicName) -> None:
    run.log.drop_before(f"sim.{name.value}", 0, 3)

    assert _refused_at_once(run, RangeMissing) == (
        f"sim.{name.value}[0]: records 0-2 are no longer in the log (retention). "
        "Nothing can be told for certain without it: restore the topic"
    )


def test_rows_that_were_cut_off_are_one_message_that_names_the_range(run: SimulatedRun) -> None:
    partition = run.log.partition("sim.trajectories", 0)
    end = len(partition.entries)
    del partition.entries[end - 1 :]

    assert _refused_at_once(run, RangeMissing) == (
        f"sim.trajectories[0]: records {end - 1}-{end - 1} were decided by the trainer, but the topic ends at "
        f"{end - 1}: it was truncated or made anew. "
        "A decision about rows that are cut off cannot be judged again: restore the topic"
    )


def test_a_policy_topic_that_was_cut_off_is_one_message(run: SimulatedRun) -> None:
    del run.log.partition("sim.policy", 0).entries[4:]

    assert "sim.policy[0] ends at 4, and the trainer has read it up to " in _refused_at_once(run, IllegalState)


def test_decisions_of_a_newer_schema_version_are_one_message(run: SimulatedRun) -> None:
    record = _forge(run).newer(TopicName.LEDGER, b"decisions/2.0")

    said = _refused_at_once(run, IllegalState)

    assert said.startswith(f"sim.ledger[0]@{record.offset}: cannot be read: schema_version: ")
    assert "'decisions/2.0', this build knows decisions/1.x; upgrade the reader" in said


@pytest.mark.parametrize(
    ("name", "schema", "known"),
    [
        (TopicName.TRAJECTORIES, b"trajectory/2.0", "trajectory/1.x"),
        (TopicName.SCORES, b"scores/2.0", "scores/1.x"),
        (TopicName.PROMPTS, b"prompt/2.0", "prompt/1.x"),
    ],
)
def test_rows_scores_and_requests_of_a_newer_schema_version_are_one_message(
    run: SimulatedRun, name: TopicName, schema: bytes, known: str
) -> None:
    record = _forge(run).newer(name, schema)
    log = run.run_log()
    rewards = RewardsAnew(log, ScoredAtOnce(ParityReward()), lambda tokens: "")

    with pytest.raises(IllegalState) as caught:
        list(_reanalysis(run, log, rewards).steps())

    assert str(caught.value).startswith(f"sim.{name.value}[{record.partition}]@{record.offset}: ")
    assert f"this build knows {known}; upgrade the reader" in str(caught.value)


def test_a_ledger_record_that_was_altered_is_told_in_words(run: SimulatedRun) -> None:
    record = next(r for r in run.records(TopicName.LEDGER) if is_arrow(r.headers))
    Forge(run).flip_byte(record, len(record.value or b"") // 2)  # type: ignore[arg-type]
    reanalysis = _reanalysis(run, run.run_log())

    list(reanalysis.steps())

    assert reanalysis.totals.problems[0] == (
        f"ledger[0]@{record.offset}: the bytes are not those its ce_id was made from: the record was altered"
    )


def test_the_command_opens_no_file_for_a_log_that_cannot_answer(
    run: SimulatedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forge(run).newer(TopicName.LEDGER, b"decisions/2.0")
    prepared = (_reanalysis(run, run.run_log()), {})
    monkeypatch.setattr(command, "_prepared", lambda at, options, found, stack: prepared)
    monkeypatch.setattr("driftlog.retained.retained", lambda at: argparse.Namespace(notes=()))
    at: Any = argparse.Namespace(run=argparse.Namespace(name="sim"))
    out = tmp_path / "again.json"

    with ExitStack() as stack, pytest.raises(IllegalState, match="upgrade the reader"):
        command._reanalyse(at, argparse.Namespace(json=False, out=out), stack)

    assert not out.exists()
