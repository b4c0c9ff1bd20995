"""The lag study's arithmetic, and that its table in the documents is the one its stored numbers give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.lag_study import FRESH, REMEDIES, RESULTS, ROOT, Run, as_text, draw, main, summarise, table
from consumers.objective.inputs import LossInputs
from consumers.objective.legality import check_legal
from consumers.objective.loss import policy_loss, step_denominators
from consumers.objective.shapes import IllegalCombination


def a_run(*, seed: int, end: float, lag: int = 2, remedy: str = "clip") -> Run:
    """20 steps: the first 17 at 0.5, the last 3 (15 %) at `end`; ESS 0 before full lag, then 0.8."""
    return Run(
        lag=lag,
        remedy=remedy,
        seed=seed,
        success=[0.5] * 17 + [end] * 3,
        ess=[0.0] * lag + [0.8] * (20 - lag),
        cut=[0.9] * lag + [0.1] * (20 - lag),
        newest=[end, end],
        greedy=1.0,
        seconds=1.0,
    )


def gradient(remedy: str, behaviour_BT: torch.Tensor) -> torch.Tensor:
    """Of the loss by each token's log-probability, where theta and proximal are -1 everywhere."""
    theta_BT = torch.full((2, 3), -1.0, requires_grad=True)
    mask_BT = torch.ones(2, 3, dtype=torch.bool)
    inputs = LossInputs(
        theta_BT=theta_BT,
        proximal_BT=theta_BT.detach(),
        behaviour_BT=behaviour_BT,
        mask_BT=mask_BT,
        advantages=torch.tensor([1.0, -0.5]),
        row_weights_B=torch.ones(2),
        policy_lag_B=torch.zeros(2, dtype=torch.int64),
    )
    denominators = step_denominators(inputs.proximal_BT, behaviour_BT, mask_BT, REMEDIES[remedy])
    policy_loss(inputs, REMEDIES[remedy], denominators).loss.backward()  # type: ignore[no-untyped-call]
    assert theta_BT.grad is not None
    return theta_BT.grad


def test_the_three_remedies_are_one_loss_at_lag_0_and_three_losses_on_older_data() -> None:
    fresh_BT, old_BT = torch.full((2, 3), -1.0), torch.full((2, 3), -1.5)
    fresh = [gradient(remedy, fresh_BT) for remedy in REMEDIES]
    assert all(torch.equal(fresh[0], other) for other in fresh)
    clip, correction, neither = (gradient(remedy, old_BT) for remedy in REMEDIES)
    assert not torch.equal(clip, correction)
    assert torch.equal(fresh[0], neither)
    torch.testing.assert_close(correction, neither * torch.tensor(0.5).exp())


def test_start_up_refuses_the_third_remedy_on_older_data_and_accepts_the_others() -> None:
    for remedy in ("clip", "correction"):
        check_legal(REMEDIES[remedy], epochs_times_minibatches=1, max_lag=2, fingerprint_differs=False)
    with pytest.raises(IllegalCombination):
        check_legal(REMEDIES["neither"], epochs_times_minibatches=1, max_lag=2, fingerprint_differs=False)


def test_a_row_takes_the_end_of_each_seed_and_only_the_steps_at_full_lag() -> None:
    (row,) = summarise([a_run(seed=0, end=0.6), a_run(seed=1, end=0.8)])
    assert (0.7, 0.6, 0.8) == row.success == row.newest
    assert (0.8, 0.8, 0.1) == (row.ess, row.ess_lowest, row.cut)


def test_nothing_is_cut_where_the_ratio_is_ignored() -> None:
    (row,) = summarise([a_run(seed=0, end=0.6, remedy="neither")])
    assert row.cut is None
    assert table([row]).endswith("| - |")


def test_a_study_with_fewer_steps_than_lag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "32", "--lags", "32"])
    assert "--steps 32 must be above the largest lag, 32" in capsys.readouterr().err


def test_table_and_plot_come_from_stored_results_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [a_run(seed=0, end=0.6), a_run(seed=0, end=0.7, lag=0, remedy=FRESH)]
    fields = [{name: getattr(run, name) for name in Run.__dataclass_fields__} for run in runs]
    stored = {"settings": {"steps": 20}, "machine": {}, "seconds": 1, "runs": fields}
    (tmp_path / "r.json").write_text(as_text(stored))
    assert stored == json.loads((tmp_path / "r.json").read_text())
    plot = tmp_path / "p.png"
    assert main(["--from-results", "--results", str(tmp_path / "r.json"), "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| 0 | all | .70 (.70 to .70) | .70 (.70 to .70) | 0.80 | 0.80 | 10.0 % |" in lines
    assert lines[-1].startswith("RESULT {")
    first = plot.read_bytes()
    draw(runs, plot)
    assert first == plot.read_bytes()


def test_the_table_in_the_documents_is_that_of_the_stored_results() -> None:
    runs = [Run(**run) for run in json.loads(RESULTS.read_text())["runs"]]
    assert table(summarise(runs)) in (ROOT / "docs" / "objectives.md").read_text()
