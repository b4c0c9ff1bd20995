"""Greedy success of a policy on the problems of the task: the most probable answer of each problem, judged once.

The problems that were trained and the held-out ones are reported apart: with so few problems a policy
memorises, and says little about what it never saw. Imports torch.
"""

from __future__ import annotations

from consumers.evaluation_plan import Ask, evaluation_requests
from driftlog.policies import initial_policy
from driftlog.run_directory import RunDirectory
from driftlog.wiring import open_store
from infra.clock import SystemClock
from infra.config import Config
from infra.countdown import FOUR, PAIRS
from infra.model import load_policy
from infra.ports import Completion, EngineRequest, Prompt
from infra.prompt_sources import countdown_prompts
from infra.rewards import countdown_reward
from producers.engines.hf import HfEngine, HfEngineSettings
from schemas.trajectory import Sampling


def greedy_report(config: Config, run: RunDirectory, manifest_uri: str, manifest_sha256: str) -> dict[str, float]:
    """Success before (initial policy) and after (the version named), trained and held-out problems apart."""
    before = initial_policy(config, run)
    after, _ = open_store(config, run).fetch(manifest_uri, manifest_sha256)
    policy = load_policy(before, config.model.dtype)
    settings = HfEngineSettings(batching="mixed", dtype=config.model.dtype, threads=1, base_directory=before)
    engine = HfEngine(settings, SystemClock())
    report: dict[str, float] = {}
    try:
        for when, directory in (("before", before), ("after", after)):
            engine.load(directory, 0)
            engine.set_proof(0)
            for prefix, held_out in (("", False), ("held_out_", True)):
                prompts = countdown_prompts(policy.encode, held_out=held_out, repeats={PAIRS: 1, FOUR: 1})
                report[f"{prefix}greedy_success_{when}"] = _success(engine, prompts, policy.eos_token_id, config)
                report[f"{prefix}greedy_problems"] = float(len(prompts))
    finally:
        engine.close()
    return report


def _success(engine: HfEngine, prompts: tuple[Prompt, ...], end_token_id: int, config: Config) -> float:
    sampling = Sampling(temperature=0.0, max_tokens=config.task.max_tokens, stop_token_ids=(end_token_id,))
    asked = evaluation_requests(prompts, [Ask(sampling=sampling, samples=1)], 0)
    requests = {str(request.group_id): request for request in asked}
    for request in requests.values():
        engine.submit(EngineRequest(request=request, rng_seed=0))
    done: list[Completion] = []
    while engine.busy():
        done.extend(engine.poll())
    reward = countdown_reward()
    right = [reward.score(requests[completion.group_id], [completion])[0].value or 0.0 for completion in done]
    return sum(right) / len(prompts)
