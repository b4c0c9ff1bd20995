"""Every metric that is published is registered, and the page says what the table says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.objective.options import (
    AdvantageEstimator,
    CorrectionKind,
    KlEstimator,
    KlPlacement,
    Objective,
    RatioDenominator,
)
from consumers.objective.settings import GRPO, ObjectiveSettings
from consumers.objective.statistics import METRICS as OBJECTIVE_METRICS
from consumers.projection import HEADLINE_METRICS
from consumers.trainer.learner_metrics import objective_metrics
from infra.config_trainer import AlarmsSection
from infra.metrics import METRICS, find, markdown, unregistered
from infra.metrics_alarms import alarms
from schemas.ledger import Reason
from tests.cases.real_path import RealPath, unlikely
from tests.fakes.policy_rows import tiny_directory

ROOT = Path(__file__).resolve().parents[2]
REFERENCE: dict[str, Any] = {"reference_directory": tiny_directory, "reference_version": 0}
OPTIONS: tuple[tuple[str, ObjectiveSettings, dict[str, Any]], ...] = (
    ("plain", GRPO, {}),
    ("two-sided, reference, entropy", replace(GRPO, two_sided_delta=4.0, kl_coefficient=0.1, entropy_coefficient=0.01),
     {**REFERENCE, "epochs": 2, "minibatches": 2, "reference_refresh_every": 1}),
    ("cispo", replace(GRPO, objective=Objective.CISPO, cispo_floor=0.1, dual_clip=None), {}),
    ("decoupled with a mask", ObjectiveSettings(
        denominator=RatioDenominator.PROXIMAL, correction=CorrectionKind.GEOMETRIC_TOKEN_TIS), {}),
    ("divergence in the reward", ObjectiveSettings(
        kl_coefficient=0.1, kl_estimator=KlEstimator.K1, kl_placement=KlPlacement.REWARD), REFERENCE),
    ("masked", ObjectiveSettings(advantage=AdvantageEstimator.MEAN_ONLY), {"mask_truncated": True}),
)  # fmt: skip


def steps(objective: ObjectiveSettings, settings: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Metrics of a fresh step, an old one, and one with nothing to train."""
    made = {key: value() if callable(value) else value for key, value in settings.items()}
    path = RealPath(objective, base=2, **made)
    for version in (2, 1):
        rows = [path.row(0, i, unlikely(4, i), float(i == 0), version=version, log_ratios=0.1) for i in range(2)]
        yield path.train([replace(rows[0], finish_reason="length"), rows[1]]).metrics
    silent = [replace(r, loss_mask=np.zeros(4, dtype=np.bool_), logprobs=np.zeros(4, dtype=np.float32)) for r in rows]
    yield path.train(silent).metrics


@pytest.mark.parametrize(("objective", "settings"), [option[1:] for option in OPTIONS], ids=[o[0] for o in OPTIONS])
def test_every_name_of_a_real_step_is_registered(objective: ObjectiveSettings, settings: dict[str, Any]) -> None:
    for metrics in steps(objective, settings):
        assert unregistered(metrics) == []


def test_a_name_that_is_not_registered_is_found() -> None:
    assert unregistered(["actor/pg_loss", "actor/pg_los", "policy_lag/count_x"]) == [
        "actor/pg_los",
        "policy_lag/count_x",
    ]


def test_every_statistic_of_the_objective_is_registered_under_its_published_name() -> None:
    assert unregistered(objective_metrics(dict.fromkeys(OBJECTIVE_METRICS, 0.0))) == []


@pytest.mark.parametrize("file", ["consumers/projection.py", "consumers/offline/status.py", "driftlog/view.py"])
def test_names_that_readers_ask_for_are_registered(file: str) -> None:
    text = (ROOT / file).read_text()
    asked = set(re.findall(r'"((?:actor|critic|mismatch|policy_lag|trainer|response_length)/[a-z_/]+)"', text))

    assert asked
    # critic/score/mean is verl's name for what other trainers may publish; ours is critic/rewards/mean.
    assert unregistered(asked - {"critic/score/mean", "policy_lag/count", "policy_lag/count_"}) == []
    assert unregistered(set(HEADLINE_METRICS) - {"critic/score/mean"}) == []


def test_names_the_projection_adds_are_registered() -> None:
    reasons = [f"dropped/{reason}" for reason in Reason if reason]
    added = ["time/train_seconds", "ledger/trajectory/trained", "ledger_total/group/dropped/stale", "switch/acks"]

    assert unregistered([*reasons, *added, "policy/void_events_total", "batch/groups", "nonfinite_metrics"]) == []


def test_no_metric_stands_twice_and_each_says_unit_and_meaning() -> None:
    names = [metric.name for metric in METRICS]

    assert len(names) == len(set(names))
    assert all(metric.unit and metric.meaning for metric in METRICS)
    found = find("policy_lag_from_issue/count_3")
    assert found is not None and found.kind == "count"


def test_the_page_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), "python -m infra.metrics > docs/metrics.md"


# ---------------------------------------------------------------- alarms

GOOD = {"actor/ratio_ess": 0.95, "actor/entropy": 1.2, "actor/pg_clipfrac": 0.02, "actor/grad_norm": 0.8}


def test_a_healthy_run_raises_no_alarm() -> None:
    assert alarms([GOOD] * 20) == []
    assert alarms([]) == []
    assert alarms([{}]) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"actor/ratio_ess": 0.2}, "effective sample size 0.20 < 0.5: the data is too old"),
        ({"mismatch/applied_ess": 0.3}, "effective sample size 0.30 < 0.5"),
        ({"actor/entropy": 0.001}, "entropy 0.001 nats < 0.02: the policy has collapsed"),
        ({"actor/pg_clipfrac": 0.6}, "clip fraction 0.60 > 0.3"),
        ({"actor/grad_norm": 1e4}, "gradient norm 1e+04 > 100 before clipping"),
        ({"group/zero_variance": 1.0}, "100% of the groups have equal rewards"),
        ({"training/skipped_in_row": 3.0}, "the last 3 optimizer steps were not made"),
    ],
)
def test_each_limit_has_its_alarm_and_reason(change: dict[str, float], words: str) -> None:
    (alarm,) = alarms([GOOD | change] * 3)

    assert alarm.startswith(words)


def test_a_steep_fall_of_entropy_is_an_alarm_before_the_floor_is_reached() -> None:
    falling = [GOOD | {"actor/entropy": value} for value in (1.0, 0.6, 0.3, 0.1)]

    (alarm,) = alarms(falling)

    assert alarm == "entropy fell by 90% within 4 steps (limit 80%): the policy is collapsing"
    assert alarms(falling, AlarmsSection(entropy_fall=0.95)) == []


def test_only_the_window_is_looked_at() -> None:
    bad = GOOD | {"actor/ratio_ess": 0.0}

    assert alarms([bad] * 5 + [GOOD] * 10) == []
    assert len(alarms([GOOD] * 10 + [bad] * 10)) == 1
