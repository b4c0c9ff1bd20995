"""A real tiny run, asked what it would have done: its own settings repeat it bit for bit, others say what changes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consumers.offline.reanalyse import Reanalysis, Segment, StepComparison, Totals, stream
from consumers.offline.reanalyse.known import NEVER, never_known
from consumers.offline.reanalyse.report import totals_lines
from consumers.offline.trained_steps import Shelf
from consumers.trainer.branching import BranchWish
from consumers.trainer.replay import ReplayRules
from schemas.errors import ConfigError
from schemas.ledger import Reason
from tests.fakes.played_run import PlayedRun
from tests.fakes.simulated_rules import simulated_rules
from tests.fakes.simulated_run import SimulatedRun
from tests.fakes.tiny_forge import Forge
from tests.sim.services import mean_only

VARIED = (2.0, 0.0, 1.0, 0.5)


def run_through(run: PlayedRun, *overrides: str) -> tuple[list[StepComparison], Totals]:
    """Its steps under these settings, and the totals."""
    reanalysis = Reanalysis(run.run_log(), run.segments(*overrides))
    return list(reanalysis.steps()), reanalysis.totals


def exact(totals: Totals) -> set[str]:
    """Statistics that must be repeated, and were compared."""
    return {name for name, one in totals.reproduction.statistics.items() if one.exact and one.compared}


def play(run: PlayedRun) -> None:
    """Versions 1 to 3: lags 0 and 1, and a group that is too old at the third."""
    run.play(0, 1, version=0, rewards=VARIED)
    run.go_live(1)
    run.play(2, 3, version=0, rewards=VARIED)
    run.go_live(2)
    run.play(4, version=0, rewards=VARIED)
    run.play(5, version=1, rewards=VARIED)
    run.play(6, version=1, rewards=VARIED)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    """max_lag 1; nobody changes it."""
    run = PlayedRun(tmp_path_factory.mktemp("played"), "trainer.max_lag=1")
    play(run)
    assert len(run.steps()) == 3
    return run


# ---------------------------------------------------------------------- its own settings


def test_its_own_settings_repeat_every_decision_and_every_statistic_to_the_last_bit(played: PlayedRun) -> None:
    steps, totals = run_through(played)

    assert not totals.reproduction.failed, (totals.reproduction.different, totals.reproduction.statistics)
    assert [step.version for step in steps] == [1, 2, 3]
    assert totals.recorded.to_dict() == totals.reanalysed.to_dict()
    assert {"stale": 1} == totals.recorded.groups_dropped
    logged = {name for step in played.steps() for name in step.metrics}
    assert {name for name in logged if not never_known(name)} == exact(totals)
    for step, control in zip(steps, played.steps(), strict=True):
        for name in exact(totals) & control.metrics.keys():
            assert control.metrics[name] == step.again[name], name
    assert totals.problem_count == 0
    assert steps[1].logged["actor/log_ratio_max"] > 0.001  # the ratios are not all 1


def test_what_cannot_be_repeated_is_named_with_its_reason(played: PlayedRun) -> None:
    totals = run_through(played)[1]

    unknown = {name: one.why_not for name, one in totals.reproduction.statistics.items() if not one.exact}
    assert unknown.keys() >= {"actor/grad_norm", "actor/entropy", "actor/lr", "trainer/idle_fraction"}
    assert set(unknown.values()) <= {why for _, why in NEVER}


@pytest.mark.parametrize(
    ("overrides", "inexact"),
    [
        (("objective.preset=decoupled",), ()),
        (("objective.preset=gspo", "objective.overrides.clip_high=0.01"), ()),
        (("objective.preset=dr_grpo",), ()),
        (("objective.overrides.kl_coefficient=0.1",), ()),
        (("objective.overrides.advantage=batch_std", "objective.overrides.std_kind=population"), ()),
        (("trainer.stale_action=down_weight", "trainer.hard_max_lag=3", "trainer.stale_decay=0.25"), ()),
        (("trainer.mask_truncated=true",), ()),
        (
            ("objective.overrides.correction=geometric",),
            ("actor/pg_loss", "actor/ratio_ess", "actor/pg_clipfrac", "actor/log_ratio_p50"),
        ),
        (("trainer.minibatches=2", "trainer.epochs=2"), ("actor/pg_loss", "actor/ratio_ess", "actor/ppo_kl")),
        (
            (
                "objective.overrides.kl_coefficient=0.1", "objective.overrides.kl_placement=reward",
                "objective.overrides.kl_estimator=k1",
            ),
            ("critic/advantages/mean",),
        ),
    ],
)  # fmt: skip
def test_every_objective_is_repeated_as_far_as_its_numbers_are_stored(
    tmp_path: Path, overrides: tuple[str, ...], inexact: tuple[str, ...]
) -> None:
    run = PlayedRun(tmp_path, "trainer.max_lag=1", *overrides, versions=2)
    run.play(0, 1, version=0, rewards=VARIED)
    run.go_live(1)
    run.play(2, 3, version=0, rewards=VARIED)

    totals = run_through(run)[1]

    assert totals.versions == 2
    assert not totals.reproduction.failed, (totals.reproduction.different, totals.reproduction.statistics)
    statistics = totals.reproduction.statistics
    assert all(not statistics[name].exact and statistics[name].why_not for name in inexact)
    assert {"mismatch/raw_ess", "mismatch/log_p50", "training/tokens", "policy_lag/mean"} <= exact(totals)
    # Not promised, and close all the same: another pass over the same weights.
    assert all(statistics[name].largest_difference < 1e-3 for name in inexact)


def test_a_run_that_was_made_under_other_settings_than_it_says_is_found_out(played: PlayedRun) -> None:
    own = played.rules()
    wrong = replace(own, advantages=mean_only)
    reanalysis = Reanalysis(played.run_log(), {played.config.digest(): Segment(own=wrong, other=wrong)})

    list(reanalysis.steps())

    found = reanalysis.totals.reproduction
    assert found.failed
    assert "the ledger says (lag, weight, use, advantage)" in found.different[0]
    assert found.statistics["critic/advantages/max"].different == 3
    assert "version 1: logged" in found.statistics["critic/advantages/max"].first_difference


def test_a_lag_limit_the_run_did_not_have_contradicts_its_decisions(played: PlayedRun) -> None:
    wrong = played.rules("trainer.max_lag=2")
    reanalysis = Reanalysis(played.run_log(), {played.config.digest(): Segment(own=wrong, other=wrong)})

    list(reanalysis.steps())

    assert reanalysis.totals.reproduction.different_count == 1
    assert "the ledger says dropped: stale, its own rules say trained" in reanalysis.totals.reproduction.different[0]


def test_an_unknown_configuration_is_named(played: PlayedRun) -> None:
    segment = played.segments()[played.config.digest()]
    with pytest.raises(ConfigError, match=r"version 1 was trained under configuration .* not stored with the run"):
        list(Reanalysis(played.run_log(), {"another": segment}).steps())


# ---------------------------------------------------------------------- other settings


def test_max_lag_0_tells_what_would_have_been_dropped_and_how_long_and_good_it_was(played: PlayedRun) -> None:
    steps, totals = run_through(played, "trainer.max_lag=0")

    assert not totals.reproduction.failed
    assert [(8, 8), (8, 0), (8, 0)] == [(s.recorded.rows_trained, s.reanalysed.rows_trained) for s in steps]
    assert {"stale": 20} == totals.reanalysed.rows_dropped
    assert {"stale": 4} == totals.recorded.rows_dropped
    sides = totals.sides.to_dict()
    assert {"dropped_in_both", "newly_dropped", "newly_dropped/stale", "trained_in_both"} == sides.keys()
    assert sides["newly_dropped"]["rows"] == 16
    assert sides["newly_dropped"]["mean_recorded_reward"] == sum(VARIED) / 4
    assert len(totals.sides.lost) == 4
    assert steps[1].logged["mismatch/raw_chi2"] > 0
    assert "mismatch/raw_chi2" not in steps[1].again  # nothing is left to take a ratio of


def test_a_group_that_was_too_old_would_have_been_usable_at_that_step(played: PlayedRun) -> None:
    steps, totals = run_through(played, "trainer.max_lag=2")

    assert [0, 0, 4] == [step.reanalysed.rows_usable for step in steps]
    assert len(totals.sides.usable) == 1
    assert totals.sides.usable[0].endswith(": dropped as stale, would have been usable at version 3")
    assert totals.reanalysed.rows_trained == totals.recorded.rows_trained
    assert steps[2].again["mismatch/raw_ess"] == steps[2].logged["mismatch/raw_ess"]


def test_another_objective_over_the_same_log_has_its_own_ratios_and_weights(played: PlayedRun) -> None:
    steps, totals = run_through(played, "objective.preset=decoupled", "objective.overrides.correction_cap=1.001")

    second = steps[1]
    assert second.again["actor/ratio_ess"] == 1.0  # over the proximal policy, at the start of the step
    assert second.again["mismatch/capped_fraction"] > 0
    assert second.corrections["token_tis"]["capped_fraction"] == second.again["mismatch/capped_fraction"]
    assert second.corrections["token_tis"]["applied_p99"] == pytest.approx(1.001)
    assert {"token_tis", "sequence_tis", "icepop", "mis", "geometric"} == second.corrections.keys()
    assert second.applied["ratio_applied_p50"] == 1.0
    assert totals.other.metrics()["mismatch/capped_fraction"] > 0 == totals.own.metrics()["mismatch/capped_fraction"]


def test_another_kind_of_deviation_changes_advantages_and_nothing_else(played: PlayedRun) -> None:
    steps, _ = run_through(played, "objective.overrides.std_kind=population")

    changed = {
        name for step in steps for name, value in step.logged.items()
        if not never_known(name) and not math.isclose(value, step.again[name], rel_tol=1e-6, abs_tol=1e-6)
    }  # fmt: skip
    assert changed == {"critic/advantages/max", "critic/advantages/min", "actor/pg_loss"}


# ---------------------------------------------------------------------- drops of every kind


def test_drops_that_follow_from_rules_are_derived_again_and_those_of_time_are_carried_over(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "trainer.max_lag=1", "trainer.filter_zero_variance=true", "trainer.order=ready")
    run.play(0, version=0, rewards=(1.0, 1.0, 1.0, 1.0))  # zero variance
    run.play(1, version=0, rewards=(None, None, None, 1.0))  # reward failed
    odd = run.sample(2, version=0, rewards=VARIED)
    run.send([replace(row, sampling=replace(row.sampling, top_k=5)) for row in odd])  # support mismatch
    run.step(6)
    run.send(run.sample(3, version=0, rewards=VARIED)[:2])  # incomplete
    run.step(6)
    run.wait(61.0)  # the others are lost
    told = {reason for _, _, reason in run.told()}
    assert {"zero_variance", "reward_failed", "support_mismatch", "incomplete", "lost"} <= told

    reanalysis = Reanalysis(run.run_log(), run.segments())
    list(reanalysis.steps())
    found = reanalysis.totals.reproduction

    assert not found.failed, found.different
    assert found.carried_over.keys() == {"incomplete", "lost"}
    assert found.decisions == 3 + 12  # three groups and their rows
    kept = Reanalysis(run.run_log(), run.segments("trainer.filter_zero_variance=false"))
    list(kept.steps())
    assert kept.totals.reanalysed.groups_usable == 1
    assert "zero_variance" in kept.totals.sides.usable[0]


def test_withheld_members_keep_their_reason_and_a_looser_limit_trains_them_without_a_score(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "trainer.max_lag=0", versions=2)
    run.play(0, 1, version=0, rewards=VARIED)
    run.go_live(1)
    asked = sorted({r.request_position for r in run.requests()})[2:4]
    for position in asked:
        fresh = run.sample(position, version=1, rewards=VARIED)
        old = run.sample(position, version=0, rewards=VARIED)
        run.send([old[0], *fresh[1:]])
    run.step(8)
    assert len(run.steps()) == 2

    own = run_through(run)[1]
    steps, loose = run_through(run, "trainer.max_lag=1")

    assert not own.reproduction.failed
    assert {"stale": 2} == own.recorded.rows_dropped
    assert (6, 8) == (steps[1].recorded.rows_trained, steps[1].reanalysed.rows_trained)
    assert steps[1].rows_without_scores == 2
    assert steps[1].again["policy_lag/max"] == 1.0
    assert loose.sides.to_dict()["newly_usable"]["rows"] == 2


def test_a_row_of_another_branch_is_refused_again(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, "trainer.max_lag=2", versions=4)
    run.play(0, 1, version=0, rewards=VARIED)
    run.go_live(1)
    run.play(2, 3, version=0, rewards=VARIED)
    run.go_live(2)
    run.changes = {"branch": BranchWish(from_version=1, when_newest=2)}
    run.restart()
    run.go_live(3)
    last = max(r.request_position for r in run.requests())
    run.play(last - 3, version=2, rewards=VARIED)
    for position in range(last - 2, last + 1):
        run.play(position, version=3, rewards=VARIED)
    assert Reason.OTHER_BRANCH in {reason for _, _, reason in run.told()}
    run.play(max(r.request_position for r in run.requests()), version=3, rewards=VARIED)

    totals = run_through(run)[1]

    assert not totals.reproduction.failed, totals.reproduction.different
    assert totals.recorded.groups_dropped[Reason.OTHER_BRANCH] == 1
    assert "abandoned" in totals.reproduction.carried_over


def test_replayed_rows_have_no_stored_scores_and_fall_with_their_first_use(tmp_path: Path) -> None:
    run = SimulatedRun(
        tmp_path, versions=6, max_lag=2, run_ahead=1, replay=ReplayRules(steps=3, groups_per_step=1, max_use=2)
    )
    own = simulated_rules(run, 2)
    first = Reanalysis(run.run_log(), {"config": Segment(own=own, other=own)})
    steps = list(first.steps())
    strict = Reanalysis(run.run_log(), {"config": Segment(own=own, other=simulated_rules(run, 0))})
    list(strict.steps())

    assert first.totals.reproduction.different_count == 0
    assert first.totals.reproduction.partial_steps == sum(step.rows_without_scores > 0 for step in steps) > 0
    assert first.totals.reanalysed.rows_replayed == first.totals.recorded.rows_replayed > 0
    assert strict.totals.reanalysed.rows_replayed == 0
    assert set(strict.totals.replays_dropped) == {"stale"}


def test_a_row_that_was_altered_afterwards_is_named(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=3)
    _, decision = Forge(run).trained()[0]
    Forge(run).edit_trajectory(str(decision.trajectory_id), reward=0.25)
    own = simulated_rules(run, 2)
    reanalysis = Reanalysis(run.run_log(), {"config": Segment(own=own, other=own)})

    list(reanalysis.steps())

    assert reanalysis.totals.failed
    assert reanalysis.totals.problem_count == 1
    assert "in the log it is 0.25" in reanalysis.totals.problems[0]


def test_rows_that_retention_removed_are_counted_and_their_groups_carried_over(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, versions=4)
    for partition in range(4):
        run.log.drop_before("sim.trajectories", partition, 1)
    own = simulated_rules(run, 2)
    reanalysis = Reanalysis(run.run_log(), {"config": Segment(own=own, other=simulated_rules(run, 0))})

    list(reanalysis.steps())
    totals = reanalysis.totals

    assert totals.rows_expired > 0
    assert totals.problem_count == 0
    assert totals.reproduction.different_count == 0
    assert totals.reproduction.carried_over["trained, but not whole in the log"] == totals.rows_expired * 4 // 3
    assert any("removed by retention" in line for line in totals_lines(totals))


def test_no_more_is_held_than_what_is_open_or_may_be_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelves: list[Shelf] = []

    class Watched(Shelf):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            shelves.append(self)

    monkeypatch.setattr(stream, "Shelf", Watched)
    run = SimulatedRun(tmp_path, versions=20)
    own = simulated_rules(run, 2)
    held = [shelves[0].held() for _ in Reanalysis(run.run_log(), {"config": Segment(own=own, other=own)}).steps()]

    assert len(held) == 20
    assert max(held) <= 2 * 4  # two steps of two groups are open at most, some read ahead in their partition
