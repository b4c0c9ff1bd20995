"""Requests and trajectories for tests of the policy side, and a tiny policy made once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from consumers.trainer.batch import BatchRow, TrainBatch
from infra.model import Policy, load_policy, save_weights, unique_tensors
from infra.model_presets import PRESETS, build_policy, supervise
from infra.ports import Completion, EngineRequest
from producers.engines.hf import HfEngine
from schemas.ids import GroupId, GroupKey, Incarnation, RunId, WorkerId, claim_id, group_id, trajectory_id
from schemas.trajectory import Fingerprint, PromptRequest, Sampling, Trajectory

PRESET = "countdown-tiny"


@functools.cache
def tiny_directory() -> Path:
    """A saved tiny policy with a few supervised steps (made once a process; never write into it)."""
    directory = Path(mkdtemp(prefix="tiny-policy-"))
    torch.set_num_threads(1)
    policy = build_policy(PRESET, 0)
    supervise(policy, replace(PRESETS[PRESET], warm_steps=12), 0)
    save_weights(policy, directory)
    return directory


def moved_directory(target: Path, seed: int, scale: float = 0.05) -> Path:
    """The tiny policy with noise on its weights: clearly another version."""
    policy = load_policy(tiny_directory())
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in unique_tensors(policy.model).values():
            tensor.add_(scale * torch.randn(tensor.shape, generator=noise))
    target.mkdir(exist_ok=True)
    save_weights(policy, target)
    return target


def request_of(
    policy: Policy, text: str, *, number: int = 0, size: int = 4, sampling: Sampling | None = None
) -> PromptRequest:
    """One group of a prompt; its number names the group."""
    return PromptRequest(
        group_id=group_id(GroupKey(run=RunId("t"), prompt=number, epoch=0, attempt=0)),
        request_position=number,
        prompt_id=f"p{number}",
        task="pairs",
        epoch=0,
        attempt=0,
        group_size=size,
        prompt_token_ids=np.asarray(policy.encode(text), dtype=np.int32),
        prompt_text=text,
        sampling=sampling or Sampling(max_tokens=8, stop_token_ids=(policy.eos_token_id,)),
        intended_step=1,
        min_version=0,
        fallback_version=0,
        issued_at_us=0,
    )


def generate(engine: HfEngine, requests: Sequence[PromptRequest], seed: int = 7) -> list[Completion]:
    """Submit, run to the end, and order by group and index."""
    for request in requests:
        engine.submit(EngineRequest(request=request, rng_seed=seed))
    done: list[Completion] = []
    while engine.busy():
        done.extend(engine.poll())
    return sorted(done, key=lambda completion: (completion.group_id, completion.index_in_group))


def trajectory_of(request: PromptRequest, completion: Completion, *, reward: float | None = 1.0) -> Trajectory:
    """The row a generator would publish."""
    group, worker, incarnation = GroupId(completion.group_id), WorkerId("g0"), Incarnation("i0")
    return Trajectory(
        trajectory_id=trajectory_id(group, completion.index_in_group),
        group_id=group,
        claim_id=claim_id(worker, incarnation, request.request_position),
        prompt_id=request.prompt_id,
        task=request.task,
        attempt=request.attempt,
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
        fingerprint=Fingerprint(tokenizer_digest="", dtype="float32", engine="hf", engine_version=""),
        finish_reason=completion.finish_reason,
        reward=reward,
        reward_function="test@1",
        requested_at_us=0,
        started_at_us=0,
        finished_at_us=0,
        published_at_us=0,
        text=completion.text,
    )


def batch_of(
    requests: Sequence[PromptRequest],
    completions: Sequence[Completion],
    *,
    version: int = 0,
    lag: int = 0,
    advantage: Callable[[int], float] = lambda place: 1.0 if place % 2 else -1.0,
) -> TrainBatch:
    """A training step over these completions."""
    by_group = {str(request.group_id): request for request in requests}
    rows = tuple(
        BatchRow(
            trajectory=trajectory_of(by_group[completion.group_id], completion),
            row_sha256=f"{place:064x}",
            advantage=advantage(place),
            weight=1.0,
            policy_lag=lag,
            use_count=1,
        )
        for place, completion in enumerate(completions)
    )
    return TrainBatch(rows=rows, version_in=version, depth_in=version)
