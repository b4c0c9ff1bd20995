"""What the tests of several ranks let a trainer do; run in one process, and again as every rank of a group.

    python -m tests.unit.learner.rank_scenarios RANK COUNT PORT PARALLEL FOLDER [ROLE]

ROLE kills: `worker_dies` rank 1 ends itself inside a step; `trainer_dies` rank 0 does, while rank 1 waits.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from consumers.objective.options import CorrectionKind, KlEstimator, KlPlacement, RatioDenominator
from consumers.objective.settings import GRPO, ObjectiveSettings
from consumers.trainer.batch import StepOutcome, TrainBatch
from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.ranks import OneRank, Ranks
from consumers.trainer.ranks_torch import TorchRanks
from schemas.errors import RankLost, StepRefused
from tests.fakes.policy_learners import changed, made_batch
from tests.fakes.policy_rows import moved_directory, tiny_directory

# Adam's first step is the sign of the gradient: a large epsilon keeps rounding of tiny gradients tiny.
PLAIN: dict[str, Any] = {"learning_rate": 1e-3, "warmup_steps": 0, "adam_epsilon": 1e-3, "micro_batch_tokens": 64}
EVERYTHING = ObjectiveSettings(
    denominator=RatioDenominator.PROXIMAL,
    correction=CorrectionKind.ICEPOP,
    band_low=0.8,
    band_high=1.25,
    kl_coefficient=0.05,
    entropy_coefficient=0.01,
)
LIMIT_S = 10.0


class Bench:
    """Makes learners over these ranks and writes down what they did."""

    def __init__(self, ranks: Ranks, parallel: str, folder: Path) -> None:
        self.ranks, self.parallel, self.folder = ranks, parallel, folder
        self.found: dict[str, Any] = {}

    def learner(self, **settings: Any) -> HfLearner:
        return HfLearner(LearnerSettings(**{**PLAIN, "parallel": self.parallel, **settings}), ranks=self.ranks)

    def note(self, name: str, learner: HfLearner, *outcomes: StepOutcome) -> None:
        """Metrics, scores and a checkpoint."""
        self.found[name] = [
            {
                "metrics": dict(sorted(outcome.metrics.items())),
                "scores": [[float(x) for x in score.proximal] for score in outcome.scores],
                "reference": [None if s.reference is None else [float(x) for x in s.reference] for s in outcome.scores],
                "skipped": outcome.skipped,
            }
            for outcome in outcomes
        ]
        directory = self.folder / name
        directory.mkdir(parents=True)
        learner.save(directory)


Step = Callable[[HfLearner, Bench], None]


def plain(learner: HfLearner, bench: Bench) -> None:
    """Two steps, the second off-policy by its own first; uneven micro-batches."""
    learner.restore(tiny_directory(), with_state=False)
    batch = made_batch()
    bench.note("plain", learner, learner.train(batch), learner.train(batch))


def one_row(learner: HfLearner, bench: Bench) -> None:
    """A rank without rows."""
    learner.restore(tiny_directory(), with_state=False)
    batch = made_batch()
    bench.note("one_row", learner, learner.train(replace(batch, rows=batch.rows[:1])))


def masked(learner: HfLearner, bench: Bench) -> None:
    """Nothing counts: no step on any rank."""
    learner.restore(tiny_directory(), with_state=False)
    first = learner.train(made_batch())
    nothing = changed(made_batch(seed=8), lambda t: {"loss_mask": np.zeros_like(t.loss_mask)})
    bench.note("masked", learner, first, learner.train(nothing))


def refused(learner: HfLearner, bench: Bench) -> None:
    """A row the maths refuses lies on one rank; the others come to the same end, and the next step works."""
    learner.restore(tiny_directory(), with_state=False)
    batch = made_batch()
    rows = (*batch.rows[:-1], replace(batch.rows[-1], advantage=math.nan))
    try:
        learner.train(replace(batch, rows=rows))
    except StepRefused as error:
        bench.found["refusal"] = str(error)
    learner.restore(tiny_directory(), with_state=False)
    bench.note("refused", learner, learner.train(batch))


def everything(learner: HfLearner, bench: Bench) -> None:
    """Every option at once, several optimizer steps, the reference refreshed after each step."""
    learner.restore(tiny_directory(), with_state=False)
    batch = old_batch(bench.folder)
    bench.note("everything", learner, learner.train(batch), learner.train(replace(batch, version_in=1, depth_in=1)))


def resumed(learner: HfLearner, bench: Bench) -> None:
    """Go on from what `everything` saved."""
    learner.restore(bench.folder / "everything", with_state=True)
    bench.note("resumed", learner, learner.train(replace(old_batch(bench.folder), version_in=2, depth_in=2)))


def penalised(learner: HfLearner, bench: Bench) -> None:
    """The divergence in the reward."""
    learner.restore(tiny_directory(), with_state=False)
    bench.found["penalties"] = list(learner.reward_penalties([row.trajectory for row in made_batch().rows]))


def old_batch(folder: Path) -> TrainBatch:
    """Sampled by other weights."""
    old = folder / "old-policy"
    return made_batch(directory=old if old.is_dir() else moved_directory(old, seed=3, scale=0.03), lag=1)


def run(ranks: Ranks, parallel: str, folder: Path) -> dict[str, Any]:
    """Every scenario, on this rank; what rank 0 found."""
    bench = Bench(ranks, parallel, folder)
    reference = {"reference_directory": tiny_directory(), "reference_version": 0}
    many = {"objective": EVERYTHING, "epochs": 2, "minibatches": 2, "reference_refresh_every": 1, **reference}
    in_reward = replace(GRPO, kl_coefficient=0.1, kl_estimator=KlEstimator.K1, kl_placement=KlPlacement.REWARD)
    in_reward_settings = {"objective": in_reward, "reference_directory": moved(folder), "reference_version": None}
    scenarios: list[tuple[Step, dict[str, Any]]] = [
        (plain, {}),
        (one_row, {}),
        (masked, {}),
        (refused, {}),
        (everything, many),
        (resumed, many),
        (penalised, in_reward_settings),
    ]
    for scenario, settings in scenarios:
        learner = bench.learner(**settings)
        if ranks.rank == 0:
            scenario(learner, bench)
            learner.close()
        else:
            learner.serve()
    return bench.found


def moved(folder: Path) -> Path:
    """Another policy, the same on every rank."""
    target = folder / f"reference-{os.getpid()}"
    return moved_directory(target, seed=5)


def main(rank: int, count: int, port: int, parallel: str, folder: Path, role: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    ranks: Ranks = OneRank()
    if count > 1:
        store = TCPStore("127.0.0.1", port, count, rank == 0, timeout=timedelta(seconds=30))
        ranks = TorchRanks(store=store, rank=rank, count=count, device="cpu", timeout_s=LIMIT_S, beat_s=0.1)
    try:
        if role:
            dies(ranks, parallel, role)
        else:
            found = run(ranks, parallel, folder)
            if rank == 0:
                (folder / "found.json").write_text(json.dumps(found))
    except RankLost as error:
        sys.stdout.write(f"RankLost: {error}\n")
        sys.stdout.flush()
        # As the command line does: nothing is waited for on the way out.
        os._exit(1)
    ranks.close()
    sys.stdout.flush()
    os._exit(0)  # as the command line does: threads that torch leaves behind abort the interpreter's exit at times


def dies(ranks: Ranks, parallel: str, role: str) -> None:
    """One rank ends without a word."""
    learner = HfLearner(LearnerSettings(**{**PLAIN, "parallel": parallel}), ranks=ranks)
    if ranks.rank:
        if role == "worker_dies":
            ranks.receive()  # restore
            os._exit(9)
        learner.serve()
        return
    if role == "worker_dies":
        learner.restore(tiny_directory(), with_state=False)
        learner.train(made_batch())
    else:
        learner.restore(tiny_directory(), with_state=False)
        os._exit(9)


if __name__ == "__main__":
    _rank, _count, _port = (int(word) for word in sys.argv[1:4])
    main(_rank, _count, _port, sys.argv[4], Path(sys.argv[5]), (sys.argv[6:] or [""])[0])
