"""What a run cost by phase, its bytes, and how trainer and generators agreed."""

from __future__ import annotations

import json
from pathlib import Path

from consumers.offline.costs import FRESH_ERROR, Agreement, CostsAssembler, agreement_words
from consumers.offline.summary import summarise
from driftlog.finish import cost_rows
from schemas import policy_events as ev
from schemas.ledger import StepCompleted
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN
from tests.fakes.told_run import step


def loaded(difference: float, **phase_s: float) -> ev.VersionLoaded:
    return ev.VersionLoaded(
        run=RUN, at_us=0, switch=None, worker="g0", incarnation="i", version=1, manifest_sha256="0" * 64,
        probe_diff_new=difference, probe_diff_old=None, probe_tolerance=1e-4, phase_s=phase_s,
    )  # fmt: skip


def test_seconds_are_added_up_by_phase_with_median_and_worst() -> None:
    costs = CostsAssembler()
    for seconds in (1.0, 2.0, 6.0):
        costs.add_event(loaded(0.0, engine_load=seconds))

    assert costs.costs().phase_s == {"load.engine_load": {"count": 3, "total": 9.0, "p50": 2.0, "max": 6.0}}


def test_the_worst_fresh_ratio_and_the_worst_probe_stand_beside_what_is_allowed() -> None:
    costs = CostsAssembler()
    for error in (2e-6, 5e-6):
        control = step(1, **{FRESH_ERROR.replace("/", "__"): error}).control
        assert isinstance(control, StepCompleted)
        costs.add_step(control)
    costs.add_event(loaded(3e-6))
    costs.add_event(loaded(1e-6))

    found = costs.costs().agreement

    assert found == Agreement(fresh_ratio_error_max=5e-6, fresh_steps=2, probe_diff_max=3e-6, tolerance=1e-4)
    assert "within 5e-06 of 1 (2 steps), probes within 3e-06; allowed 0.0001" in agreement_words(found)


def test_what_nobody_measured_is_absent_and_not_zero() -> None:
    found = CostsAssembler().costs()

    assert found.phase_s == {}
    assert found.agreement == Agreement(fresh_ratio_error_max=None, fresh_steps=0, probe_diff_max=None, tolerance=None)
    assert agreement_words(found.agreement) == ""


def test_the_summary_holds_bytes_and_seconds_of_every_phase_the_log_tells_of(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    costs = json.loads(summarise(run.run_log()).to_json())["costs"]

    assert costs["phase_s"]["step.whole"]["count"] == 3
    assert costs["phase_s"]["load.fetch"]["count"] > 0
    assert costs["phase_s"]["generation.group"]["count"] > 0
    assert costs["bytes"]["trajectories"] > 0
    assert costs["bytes"]["checkpoint_max"] <= costs["bytes"]["checkpoints"]
    labels = dict(cost_rows(costs))
    assert labels["a step, s"] == "whole 2"
    assert labels["a load, s"] == "fetch 0.1"
