"""Does it learn? The demo's loop in one process, without the log: engine, reward, learner, delayed weights.

Each step generates with the weights of `--lag` steps ago, as an asynchronous run would. Weights travel
through checkpoint directories, so saving, loading and the engine's numbers are the real ones.

    python -m benchmarks.learning_curve --seeds 0 1 2 --steps 240

The last line is RESULT {json}: mean reward of the first and last tenth, greedy success before and after.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from consumers.objective.advantages import group_advantages
from consumers.objective.settings import ObjectiveSettings, preset
from consumers.trainer.batch import BatchRow, StepOutcome, TrainBatch
from consumers.trainer.learner import HfLearner
from consumers.trainer.learner_settings import LearnerSettings
from infra.countdown import FOUR, PAIRS
from infra.model import Policy, load_policy
from infra.model_presets import warm_start
from infra.ports import Completion, EngineRequest, Prompt
from infra.prompt_sources import ShuffledPrompts, countdown_prompts, countdown_source
from infra.rewards import countdown_reward
from producers.engines.hf import HfEngine, HfEngineSettings
from schemas.ids import GroupId, GroupKey, Incarnation, RunId, WorkerId, claim_id, group_id, trajectory_id
from schemas.trajectory import Fingerprint, PromptRequest, Sampling, Trajectory

RUN = RunId("curve")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSettings:
    """One curve."""

    seed: int
    steps: int
    lag: int
    groups: int
    group_size: int
    learning_rate: float
    objective: ObjectiveSettings
    batching: str
    threads: int
    declared_lag: int | None = None
    """max_lag the learner is told, if not `lag`: a lower one trains what check_legal would refuse"""


class WallClock:
    """Clock of this machine."""

    def now_us(self) -> int:
        """Microseconds since 1970."""
        return time.time_ns() // 1000

    def monotonic_s(self) -> float:
        """Seconds, never back."""
        return time.monotonic()


def main(arguments: Sequence[str]) -> int:
    """Run every seed, print its curve, and the summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--lag", type=int, default=2, help="versions between generation and training")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--objective", default="grpo", help="a preset of consumers.objective.settings")
    parser.add_argument("--batching", choices=("mixed", "group"), default="mixed")
    parser.add_argument("--threads", type=int, default=1)
    options = vars(parser.parse_args(arguments))
    seeds = options.pop("seeds")
    results = []
    for seed in seeds:
        result = run_curve(CurveSettings(seed=seed, **options | {"objective": preset(options["objective"])}))
        print(json.dumps(result))
        results.append(result)
    first = float(np.mean([result["success_first"] for result in results]))
    last = float(np.mean([result["success_last"] for result in results]))
    gains = [result["success_last"] - result["success_first"] for result in results]
    summary = {
        "bench": "learning_curve",
        **options,
        "seeds": seeds,
        "success_first": round(first, 4),
        "success_last": round(last, 4),
        "gain_mean": round(float(np.mean(gains)), 4),
        "gain_worst_seed": round(min(gains), 4),
        "greedy_last": round(float(np.mean([result["greedy_last"] for result in results])), 4),
        "held_out_greedy_last": round(float(np.mean([result["held_out_greedy_last"] for result in results])), 4),
        "steps_per_s": round(float(np.mean([result["steps_per_s"] for result in results])), 2),
    }
    print("RESULT " + json.dumps(summary))
    return 0


def run_curve(settings: CurveSettings) -> dict[str, object]:
    """Train one seed; what it reached."""
    with TemporaryDirectory(prefix="learning-curve-") as folder:
        root = Path(folder)
        started_s = time.perf_counter()
        warm_start("countdown-tiny", settings.seed, root / "warm")
        warm_s = time.perf_counter() - started_s
        loop = CurveLoop(settings, root)
        before = loop.greedy(held_out=False)
        started_s = time.perf_counter()
        rewards, outcomes = loop.train()
        seconds = time.perf_counter() - started_s
        tenth = max(1, settings.steps // 10)
        curve = [float(np.mean(rewards[at : at + tenth])) for at in range(0, settings.steps, tenth)]
        errors = [
            o.metrics["mismatch/fresh_ratio_error_max"]
            for o in outcomes
            if "mismatch/fresh_ratio_error_max" in o.metrics
        ]
        return {
            "seed": settings.seed,
            "success_first": round(float(np.mean(rewards[:tenth])), 4),
            "success_last": round(float(np.mean(rewards[-tenth:])), 4),
            "greedy_first": round(before, 4),
            "greedy_last": round(loop.greedy(held_out=False), 4),
            "held_out_greedy_last": round(loop.greedy(held_out=True), 4),
            "pairs_last": round(float(np.mean(loop.by_task[PAIRS][-tenth:])), 4),
            "four_first": round(float(np.mean(loop.by_task[FOUR][:tenth])), 4),
            "four_last": round(float(np.mean(loop.by_task[FOUR][-tenth:])), 4),
            "clipfrac_mean": round(float(np.mean([o.metrics["actor/pg_clipfrac"] for o in outcomes])), 4),
            "ess_mean": round(float(np.mean([o.metrics["actor/ratio_ess"] for o in outcomes])), 4),
            "grad_norm_mean": round(float(np.mean([o.metrics["actor/grad_norm"] for o in outcomes])), 3),
            "fresh_ratio_error_max": max(errors, default=None),
            "curve": [round(value, 3) for value in curve],
            "warm_start_s": round(warm_s, 1),
            "generate_ms": round(1e3 * loop.generate_s / settings.steps, 1),
            "train_ms": round(1e3 * loop.train_s / settings.steps, 1),
            "publish_ms": round(1e3 * loop.publish_s / settings.steps, 1),
            "steps_per_s": round(settings.steps / seconds, 2),
        }


class CurveLoop:
    """Engine and learner of one curve."""

    def __init__(self, settings: CurveSettings, root: Path) -> None:
        """root: an empty directory but for `warm`, the model to start from."""
        self._settings = settings
        self._root = root
        self._learner = HfLearner(
            LearnerSettings(
                objective=settings.objective,
                max_lag=settings.lag if settings.declared_lag is None else settings.declared_lag,
                learning_rate=settings.learning_rate,
                micro_batch_tokens=2048,
                threads=settings.threads,
                seed=settings.seed,
            )
        )
        self._learner.restore(root / "warm", with_state=False)
        self._policy: Policy = load_policy(root / "warm")
        self._source = countdown_source(self._policy.encode, settings.seed)
        batching = "group" if settings.batching == "group" else "mixed"
        self._engine = HfEngine(HfEngineSettings(batching=batching), WallClock())
        self._reward = countdown_reward()
        self._cursor = 0
        self.generate_s = self.train_s = self.publish_s = 0.0
        self.by_task: dict[str, list[float]] = {PAIRS: [], FOUR: []}
        """mean reward of each step that had the task"""
        self._publish(0)
        self._load(0)

    def train(self) -> tuple[list[float], list[StepOutcome]]:
        """All steps; mean reward and outcome of each."""
        rewards: list[float] = []
        outcomes: list[StepOutcome] = []
        for step in range(self._settings.steps):
            outcomes.append(self.step(step))
            rewards.append(outcomes[-1].metrics["critic/rewards/mean"])
        return rewards, outcomes

    def step(self, step: int) -> StepOutcome:
        """Generate with the weights of `lag` steps ago, train, publish. Steps count 0, 1, 2, ..."""
        started_s = time.perf_counter()
        self._load(max(0, step - self._settings.lag))
        loaded_s = time.perf_counter()
        batch = self._batch(step)
        generated_s = time.perf_counter()
        outcome = self._learner.train(batch)
        trained_s = time.perf_counter()
        self._publish(step + 1)
        self.publish_s += time.perf_counter() - trained_s + loaded_s - started_s
        self.generate_s += generated_s - loaded_s
        self.train_s += trained_s - generated_s
        for task, rewards_of_task in self.by_task.items():
            values = [row.trajectory.reward for row in batch.rows if row.trajectory.task == task]
            if values:
                rewards_of_task.append(float(np.mean(np.asarray(values, dtype=np.float64))))
        return outcome

    def greedy(self, *, held_out: bool) -> float:
        """Greedy success of the newest weights on every problem."""
        return self._success(held_out=held_out, size=1, temperature=0.0, epoch=0)

    def sampled(self, *, size: int, epoch: int) -> float:
        """Success of the newest weights at temperature 1: `size` answers to each prompt of one epoch of training.

        epoch: gives the answers random numbers of their own; above any epoch that is trained.
        """
        return self._success(held_out=False, size=size, temperature=1.0, epoch=epoch)

    def _success(self, *, held_out: bool, size: int, temperature: float, epoch: int) -> float:
        newest = max(int(path.name[1:]) for path in self._root.glob("v*"))
        self._load(newest)
        prompts = ShuffledPrompts(countdown_prompts(self._policy.encode, held_out=held_out), 0)
        drawn = [(prompts.at(at)[0], epoch) for at in range(len(prompts))]
        requests = [self._request(prompt, size=size, temperature=temperature) for prompt in drawn]
        return float(np.mean([reward for _, _, reward in self._generate(requests)]))

    def _batch(self, step: int) -> TrainBatch:
        requests = []
        for _ in range(self._settings.groups):
            requests.append(self._request(self._source.at(self._cursor), self._settings.group_size, temperature=1.0))
            self._cursor += 1
        done = self._generate(requests)
        number = {request.group_id: place for place, request in enumerate(requests)}
        advantages = group_advantages(
            torch.tensor([reward for _, _, reward in done], dtype=torch.float64),
            torch.tensor([number[request.group_id] for request, _, _ in done]),
            self._settings.objective.advantage,
        ).advantages_N.tolist()
        lag = min(step, self._settings.lag)
        rows = tuple(
            BatchRow(
                trajectory=self._trajectory(request, completion, reward),
                row_sha256="",
                advantage=advantage,
                weight=1.0,
                policy_lag=lag,
                use_count=1,
            )
            for (request, completion, reward), advantage in zip(done, advantages, strict=True)
        )
        return TrainBatch(rows=rows, version_in=step, depth_in=step)

    def _generate(self, requests: Sequence[PromptRequest]) -> list[tuple[PromptRequest, Completion, float]]:
        by_group = {str(request.group_id): request for request in requests}
        for request in requests:
            self._engine.submit(EngineRequest(request=request, rng_seed=self._settings.seed))
        completions: list[Completion] = []
        while self._engine.busy():
            completions.extend(self._engine.poll())
        completions.sort(key=lambda c: (by_group[c.group_id].request_position, c.group_id, c.index_in_group))
        done = []
        for completion in completions:
            request = by_group[completion.group_id]
            reward = self._reward.score(request, [completion])[0]
            assert reward.value is not None, reward.error
            done.append((request, completion, reward.value))
        return done

    def _request(self, drawn: tuple[Prompt, int], size: int, temperature: float) -> PromptRequest:
        prompt, epoch = drawn
        return PromptRequest(
            group_id=group_id(GroupKey(run=RUN, prompt=prompt.index, epoch=epoch, attempt=0)),
            request_position=self._cursor,
            prompt_id=prompt.prompt_id,
            task=prompt.task,
            epoch=epoch,
            attempt=0,
            group_size=size,
            prompt_token_ids=prompt.token_ids,
            prompt_text=prompt.text,
            reference=dict(prompt.reference),
            sampling=Sampling(temperature=temperature, max_tokens=8, stop_token_ids=(self._policy.eos_token_id,)),
            intended_step=0,
            min_version=0,
            fallback_version=0,
            issued_at_us=0,
        )

    def _trajectory(self, request: PromptRequest, completion: Completion, reward: float) -> Trajectory:
        group = GroupId(request.group_id)
        worker, incarnation = WorkerId("g0"), Incarnation("i0")
        return Trajectory(
            trajectory_id=trajectory_id(group, completion.index_in_group),
            group_id=group,
            claim_id=claim_id(worker, incarnation, request.request_position),
            prompt_id=request.prompt_id,
            task=request.task,
            attempt=0,
            index_in_group=completion.index_in_group,
            group_size=request.group_size,
            worker_id=worker,
            incarnation=incarnation,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            loss_mask=completion.loss_mask,
            segments=completion.segments,
            sampling=request.sampling,
            fingerprint=Fingerprint(**self._engine.identity()),
            finish_reason=completion.finish_reason,
            reward=reward,
            reward_function=self._reward.name,
            requested_at_us=0,
            started_at_us=completion.started_at_us,
            finished_at_us=completion.finished_at_us,
            published_at_us=completion.finished_at_us,
        )

    def _publish(self, version: int) -> None:
        directory = self._root / f"v{version}"
        directory.mkdir()
        self._learner.save(directory)
        shutil.rmtree(self._root / f"v{version - self._settings.lag - 1}", ignore_errors=True)

    def _load(self, version: int) -> None:
        self._engine.load(self._root / f"v{version}", version)
        self._engine.set_proof(version)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
