"""Steps made again from log and store: equal where nothing was touched, otherwise the part that differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from consumers.offline.replay.compare import NOT_RESULTS
from consumers.offline.replay.report import ReplaySum
from consumers.trainer.batch import StepOutcome, TrainBatch
from consumers.trainer.replay import ReplayRules
from infra.metrics import unregistered
from schemas.checkpoint import TRAINER_STATE_NAME, WEIGHTS_NAME
from schemas.errors import StepRefused
from schemas.ledger import StepCompleted
from schemas.policy_events import VersionRetired
from schemas.scores_codec import decode_scores, encode_scores, scores_headers
from schemas.topics import TopicName
from tests.fakes.replay_rig import ReplayLearner, Rig, elsewhere, parts_of
from tests.fakes.simulated_run import SimulatedRun
from tests.fakes.tiny_forge import Forge

REPLAYING = ReplayRules(steps=3, groups_per_step=1, max_use=2)


class _AnotherMetric(ReplayLearner):
    """One number of one step comes out otherwise."""

    def train(self, batch: TrainBatch) -> StepOutcome:
        outcome = super().train(batch)
        metrics = {**outcome.metrics, "actor/pg_loss": 0.5 + 1e-12 * (batch.version_in == 1)}
        return dataclasses.replace(outcome, metrics=metrics)


class _OtherBits(ReplayLearner):
    """The update of one step comes out otherwise."""

    def train(self, batch: TrainBatch) -> StepOutcome:
        outcome = super().train(batch)
        if batch.version_in == 1:
            self.weights = f"{self.weights[:-1]}x"
        return outcome


class _Refusing(ReplayLearner):
    def train(self, batch: TrainBatch) -> StepOutcome:
        if batch.version_in == 1:
            raise StepRefused("behaviour of demo/p0/0 is not finite")
        return super().train(batch)


def _forge(run: SimulatedRun) -> Forge:
    return Forge(run)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- nothing was touched


def test_every_step_of_a_run_comes_out_equal_and_only_the_first_is_restored(tmp_path: Path) -> None:
    rig = Rig(run=SimulatedRun(tmp_path, versions=5, max_lag=2, replay=REPLAYING))

    steps = rig.make()

    assert parts_of(steps) == {}
    assert [step.started_from for step in steps] == ["checkpoint", "memory", "memory", "memory", "memory"]
    assert {step.files_compared for step in steps} == {(WEIGHTS_NAME, "probe.arrow", TRAINER_STATE_NAME)}
    assert all(step.metrics_compared > 20 and step.scores_compared == 6 for step in steps)
    uses = [row.use_count for batch in rig.learner.batches for row in batch.rows]
    assert uses.count(2) >= 9
    assert (rig.words, rig.opened) == ([], [("config", 1)])


def test_one_version_alone_is_made_from_its_parent(tmp_path: Path) -> None:
    rig = Rig(run=SimulatedRun(tmp_path, versions=4, max_lag=2, replay=REPLAYING))

    (step,) = rig.make(3, None)

    assert (step.version, step.parent, step.equal, step.started_from) == (3, 2, True, "checkpoint")


def test_a_branched_run_comes_out_equal_on_both_branches(tmp_path: Path) -> None:
    rig = Rig(run=SimulatedRun(tmp_path, versions=4, then_branch_from=2))

    steps = rig.make()

    assert parts_of(steps) == {}
    assert [(step.version, step.started_from) for step in steps][3:] == [
        (4, "memory"),
        (6, "checkpoint"),
        (7, "memory"),
    ]


def test_versions_saved_without_state_are_gone_through_in_memory(tmp_path: Path) -> None:
    rig = Rig(run=SimulatedRun(tmp_path, versions=6, state_every=3))

    steps = rig.make(2, 6)

    assert parts_of(steps) == {}
    assert [step.version for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [bool(step.not_compared) for step in steps] == [True, True, False, True, True, False]


def test_a_step_of_another_configuration_gets_a_learner_of_its_own_restored_from_the_store(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=3)
    _forge(run).edit_control(StepCompleted, 1, config_digest="other")
    rig = Rig(run=run)

    steps = rig.make()

    assert parts_of(steps) == {}
    assert rig.opened == [("config", 1), ("other", 1), ("config", 1)]
    assert [step.started_from for step in steps] == ["checkpoint"] * 3


def test_of_a_retired_version_the_log_is_compared_and_the_next_step_goes_on_from_memory(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=3)
    run.append_event(VersionRetired(run="sim", at_us=1_000_000, version=2, rule="keep=1"))
    rig = Rig(run=run)

    steps = rig.make()

    assert parts_of(steps) == {}
    told = "was retired: its weights were removed at 1970-01-01T00:00:01.000000Z by rule keep=1"
    assert [step.not_compared for step in steps] == [(), (f"weights and state: version 2 {told}",), ()]
    assert [step.started_from for step in steps] == ["checkpoint", "memory", "memory"]
    assert [len(step.files_compared) for step in steps] == [3, 0, 3]
    assert rig.opened == [("config", 1)]


def test_metrics_that_are_left_out_are_registered_and_have_a_reason() -> None:
    assert unregistered(NOT_RESULTS) == []
    assert all(NOT_RESULTS.values())


# ---------------------------------------------------------------------- data


def test_an_altered_reward_names_the_trajectory_first_and_the_next_step_starts_from_the_store(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=3)
    version, decision = _forge(run).trained()[6]
    assert version == 2
    _forge(run).edit_trajectory(str(decision.trajectory_id), reward=0.75)

    steps = Rig(run=run).make()

    assert parts_of(steps) == {2: ("data", "state", "metrics", "weights")}
    first = steps[1].differences[0]
    assert (first.part, first.subject) == ("data", decision.trajectory_id)
    assert first.place == f"trajectories[{decision.partition}]@{decision.offset} row {decision.row}"
    assert "in the log it is 0.75" in first.detail
    about = {d.subject for d in steps[1].differences if "advantage" in d.detail}
    assert about == {f"{decision.group_id}/{i}" for i in range(3)}
    assert steps[2].started_from == "checkpoint"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantage": 7.0}, "advantage 7.0 in the ledger, computed again"),
        ({"policy_lag": 2}, "policy_lag 2 in the ledger, along the chain"),
        ({"weight": 0.25}, "weight 0.25 in the ledger, computed again 1.0"),
    ],
)
def test_a_decision_altered_in_the_ledger_is_data_and_the_weights_still_come_out(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run = SimulatedRun(tmp_path, versions=2)
    _, decision = _forge(run).trained()[0]
    _forge(run).edit_decision(str(decision.trajectory_id), **change)

    steps = Rig(run=run).make()

    assert parts_of(steps) == {1: ("data",)}
    assert any(words in d.detail and d.subject == decision.trajectory_id for d in steps[0].differences)


def test_a_replay_with_another_advantage_than_its_first_use_is_data(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=4, max_lag=2, replay=REPLAYING)
    forge = _forge(run)

    def alter(rows: list[Any]) -> list[Any]:
        return [dataclasses.replace(r, advantage=3.0) if r.use_count == 2 else r for r in rows]

    forge.edit_decisions(3, alter)

    steps = Rig(run=run).make(3, None)

    found = [d.detail for d in steps[0].differences if "at its first use" in d.detail]
    assert len(found) == 3
    assert found[0].startswith("advantage 3.0 in the ledger, ")


def test_a_row_that_is_gone_stops_its_step_and_no_other(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=3)
    forge = _forge(run)
    _, decision = forge.trained()[0]
    record = next(
        r
        for r in forge.records(TopicName.TRAJECTORIES)
        if (r.partition, r.offset) == (decision.partition, decision.offset)
    )
    forge.remove(record)

    steps = Rig(run=run).make()

    assert [step.trained for step in steps] == [False, True, True]
    assert parts_of(steps) == {1: ("data",)}
    assert "NOT MADE AGAIN" in steps[0].lines()[0]


# ---------------------------------------------------------------------- state, metrics, scores, weights


def test_a_file_of_the_parent_that_is_not_what_was_published_is_state_and_the_step_is_not_made(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=3)
    _alter_file(run, 1, TRAINER_STATE_NAME)

    steps = Rig(run=run).make()

    assert parts_of(steps) == {1: ("weights",), 2: ("state",)}
    assert TRAINER_STATE_NAME in steps[1].differences[0].detail
    assert [step.trained for step in steps] == [True, False, True]


def test_an_altered_metric_of_the_ledger_is_told_with_both_numbers(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=2)
    step = next(t.control for t in run.run_log().transactions() if isinstance(t.control, StepCompleted))
    _forge(run).edit_control(StepCompleted, 0, metrics={**step.metrics, "critic/rewards/mean": 0.875})

    steps = Rig(run=run).make()

    assert parts_of(steps) == {1: ("metrics",)}
    assert steps[0].differences[0].subject == "critic/rewards/mean"
    assert "0.875 when it was trained" in steps[0].differences[0].detail
    assert steps[1].started_from == "memory"


def test_the_last_bit_of_a_metric_counts(tmp_path: Path) -> None:
    steps = Rig(run=SimulatedRun(tmp_path, versions=3), learner=_AnotherMetric()).make()

    assert parts_of(steps) == {2: ("metrics",)}


def test_metrics_that_are_no_results_are_not_compared(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=1)
    step = next(t.control for t in run.run_log().transactions() if isinstance(t.control, StepCompleted))
    _forge(run).edit_control(StepCompleted, 0, metrics={**step.metrics, **dict.fromkeys(NOT_RESULTS, 0.125)})

    assert parts_of(Rig(run=run).make()) == {}


def test_an_altered_rng_digest_is_state(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=1)
    _forge(run).edit_control(StepCompleted, 0, rng_digest="f" * 8)

    assert parts_of(Rig(run=run).make()) == {1: ("state",)}


def test_other_weights_are_told_by_file_and_the_next_step_starts_from_the_store(tmp_path: Path) -> None:
    steps = Rig(run=SimulatedRun(tmp_path, versions=3), learner=_OtherBits()).make()

    assert parts_of(steps) == {2: ("weights",)}
    assert [d.subject for d in steps[1].differences] == [WEIGHTS_NAME, "probe.arrow"]
    assert [step.started_from for step in steps] == ["checkpoint", "memory", "checkpoint"]


def test_other_weights_with_no_stored_state_behind_them_are_gone_on_from_and_that_is_told(tmp_path: Path) -> None:
    rig = Rig(run=SimulatedRun(tmp_path, versions=4, state_every=4), learner=_OtherBits())

    steps = rig.make()

    assert [step.started_from for step in steps] == ["checkpoint", "memory", "memory", "memory"]
    assert parts_of(steps)[3][0] == "state"
    assert "came out otherwise here" in steps[2].differences[0].detail


def test_altered_scores_are_told_by_trajectory_and_size(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=2)
    trajectory_id = _alter_scores(run)

    steps = Rig(run=run).make()

    assert parts_of(steps) == {1: ("scores",)}
    assert steps[0].differences[0].subject == trajectory_id
    assert "proximal log-probabilities differ at 1 of 3 tokens, by 0.5 at most" in steps[0].differences[0].detail


def test_scores_that_retention_removed_are_not_compared_and_that_is_said(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=2)
    for partition in range(4):
        run.log.drop_before("sim.scores", partition, 10**6)

    steps = Rig(run=run).make()

    assert parts_of(steps) == {}
    assert [step.not_compared for step in steps] == [("scores: retention has removed them",)] * 2


def test_a_step_that_the_maths_refuses_here_is_told_and_the_next_one_is_made(tmp_path: Path) -> None:
    steps = Rig(run=SimulatedRun(tmp_path, versions=3), learner=_Refusing()).make()

    assert parts_of(steps) == {2: ("step",)}
    assert [step.trained for step in steps] == [True, False, True]


# ---------------------------------------------------------------------- environment


def test_another_environment_is_told_before_the_step_and_is_no_difference_by_itself(tmp_path: Path) -> None:
    rig = Rig(
        run=SimulatedRun(tmp_path, versions=2),
        environment=elsewhere(library_versions={"torch": "9"}, threads=4, code_revision="git:other"),
    )  # fmt: skip

    steps = rig.make()

    assert parts_of(steps) == {}
    assert [d.subject for d in steps[0].environment] == ["torch", "threads", "code"]
    assert len(rig.words) == 3
    assert "environment: threads: 1 when it was trained, 4 here" in rig.words[1]


def test_where_bits_differ_in_another_environment_that_is_named_as_the_first_part(tmp_path: Path) -> None:
    rig = Rig(run=SimulatedRun(tmp_path, versions=3), learner=_OtherBits(), environment=elsewhere(device_type="cuda"))

    steps = rig.make()

    assert parts_of(steps) == {2: ("environment", "weights")}
    assert any("but here environment: device: cpu when it was trained, cuda here" in line for line in steps[1].lines())


# ---------------------------------------------------------------------- the sum


def test_the_last_line_counts_steps_and_differences(tmp_path: Path) -> None:
    total = ReplaySum()
    steps = Rig(run=SimulatedRun(tmp_path, versions=3), learner=_OtherBits()).make()
    for step in steps:
        total.add(dataclasses.replace(step, recorded_s=3.0, replay_s=2.0))

    assert total.to_dict() == {"replayed": 3, "mismatched": 1, "speed_vs_training": 1.5}
    assert json.loads(json.dumps(steps[1].to_dict()))["parts"] == ["weights"]


def _alter_file(run: SimulatedRun, version: int, name: str) -> None:
    path = run.directory(version) / name
    path.chmod(0o600)
    path.write_bytes(path.read_bytes() + b" ")


def _alter_scores(run: SimulatedRun) -> str:
    forge = _forge(run)
    for record in forge.records(TopicName.SCORES):
        rows = list(decode_scores(record.value, record.headers))
        if rows[0].version_in == 0:
            proximal = rows[0].proximal.copy()
            proximal[1] += 0.5
            rows[0] = dataclasses.replace(rows[0], proximal=proximal)
            value = encode_scores(rows)
            forge.rewrite(record, value=value, headers=scores_headers(rows, value, "forger", 0))
            return rows[0].trajectory_id
    raise AssertionError("no scores")
