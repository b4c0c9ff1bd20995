"""What a run of a given size will write, hold and wait for. Pure: figures in, figures out.

Bytes of records are not estimated: a group of that size is encoded by the codec that will write it, and compressed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
import zstandard

from infra.config import Config
from schemas.errors import ConfigError, InvalidRecord
from schemas.ids import GroupKey, Incarnation, WorkerId, claim_id, group_id, run_id, trajectory_id
from schemas.ledger import Decision, DecisionRow, Subject
from schemas.ledger_codec import encode_decisions
from schemas.scores_codec import ScoreRow, encode_scores
from schemas.topics import TOPICS, TopicName
from schemas.trajectory import Fingerprint, IntArray, Sampling, Segment, Trajectory
from schemas.trajectory_codec import encode_group

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = 8
"""AdamW keeps two float32 numbers a parameter"""
MASTER_BYTES = 4
"""the trainer's own weights are float32, whatever is served"""
PARTITION_BYTES_PER_S = 10 * 1024**2
"""what one partition takes with room to spare, on one disk and with one reader that decodes"""
PARTITIONS = TOPICS[TopicName.TRAJECTORIES].partitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the configuration does not say."""

    parameters: float
    completion_tokens: int
    """in the mean"""
    prompt_tokens: int
    tokens_per_s: float
    """all generators together"""
    step_s: float
    """the trainer's compute for one step"""
    write_bytes_per_s: float
    """checkpoint store, sustained: saved, hashed and fsynced"""
    fetch_bytes_per_s: float
    """from the store into one generator"""
    vocabulary: int = 50_000
    adapter_parameters: float = 0.0
    """with lora.rank above 0: what is trained"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rates an hour, sizes in bytes, times in seconds."""

    group_bytes: int
    """one record of `trajectories`, before compression"""
    group_stored_bytes: int
    """the same with its scores and decisions, as the broker keeps it"""
    groups_per_hour: float
    versions_per_hour: float
    step_s: float
    bound_by: Literal["generation", "training"]
    log_bytes_per_hour: float
    version_bytes: int
    state_bytes: int
    store_bytes: float | None
    """at its largest; None: every version is kept, it grows by store_bytes_per_hour"""
    store_bytes_per_hour: float
    publish_s: float
    switch_s: float
    """publish to live, without the drain"""
    age_s: float
    """from a request to the end of the step that trains it, in steady work"""
    trainer_bytes: float
    """weights, gradients and optimizer state; activations come on top"""
    partitions_worth: int
    """partitions of `trajectories` that this rate needs"""


def plan(config: Config, load: Workload) -> Plan:
    """The bill of a run that never stands still. ConfigError when a group is larger than a record may be."""
    rows = _sample_group(config.task.group_size, load)
    if config.lora.rank and not load.adapter_parameters:
        raise ConfigError(f"lora.rank = {config.lora.rank}: say how many parameters that trains (--adapter-parameters)")
    try:
        record = encode_group(rows)
    except InvalidRecord as error:
        raise ConfigError(
            f"a group of task.group_size = {config.task.group_size} with {load.completion_tokens} completion tokens "
            f"each cannot be written: {error}; lower one of them"
        ) from error
    scores = encode_scores([_scores_of(row) for row in rows])
    decisions = encode_decisions([_decision_of(row) for row in rows])
    stored = sum(_compressed(value) for value in (record, scores, decisions))
    step_tokens = config.trainer.groups_per_step * config.task.group_size * load.completion_tokens
    generation_s = step_tokens / load.tokens_per_s
    trained = load.adapter_parameters if config.lora.rank else load.parameters
    state = int((STATE_BYTES + MASTER_BYTES) * trained)
    version = int(DTYPE_BYTES[config.model.dtype] * load.parameters)
    if config.lora.rank and config.lora.publish == "adapter":
        version = int(MASTER_BYTES * trained)
    publish_s = (version + state / config.checkpoints.state_every) / load.write_bytes_per_s
    behind = config.trainer.overlap_publication
    training_s = max(load.step_s, publish_s) if behind else load.step_s + publish_s
    step_s = max(generation_s, training_s)
    versions = 3600 / step_s
    groups = versions * config.trainer.groups_per_step
    keep = config.checkpoints.keep
    each = version + state / config.checkpoints.state_every
    rate = groups * stored / 3600
    return Plan(
        group_bytes=len(record),
        group_stored_bytes=stored,
        groups_per_hour=groups,
        versions_per_hour=versions,
        step_s=step_s,
        bound_by="generation" if generation_s >= training_s else "training",
        log_bytes_per_hour=groups * stored,
        version_bytes=version,
        state_bytes=state,
        store_bytes=None if keep == "all" else keep * each,
        store_bytes_per_hour=versions * each if keep == "all" else 0.0,
        publish_s=publish_s,
        switch_s=publish_s + version / load.fetch_bytes_per_s,
        age_s=(config.trainer.effective_run_ahead + 1) * step_s + publish_s,
        # float32 weights, then for what is trained: gradient and two moments
        trainer_bytes=MASTER_BYTES * load.parameters + (4 + STATE_BYTES) * trained,
        partitions_worth=max(1, ceil(rate / PARTITION_BYTES_PER_S)),
    )


def warnings(config: Config, load: Workload, found: Plan) -> Iterator[str]:
    """What will not work like this, each with its inequality and the way out."""
    groups_at_once = config.generator.workers * config.generator.max_groups_in_flight
    per_sequence = load.tokens_per_s / (groups_at_once * config.task.group_size)
    longest_s = config.task.max_tokens / per_sequence
    if longest_s >= config.trainer.group_timeout_s:
        yield (
            f"a completion of task.max_tokens = {config.task.max_tokens} takes about {longest_s:.0f} s with "
            f"{groups_at_once} groups at once >= trainer.group_timeout_s = {config.trainer.group_timeout_s:g}: groups "
            "would be given up while they are sampled; raise it, or lower generator.max_groups_in_flight"
        )
    if found.switch_s >= config.coordinator.switch_deadline_s:
        yield (
            f"a switch takes about {found.switch_s:.0f} s >= coordinator.switch_deadline_s = "
            f"{config.coordinator.switch_deadline_s:g}: every switch would fail; raise it"
        )
    if found.switch_s >= found.step_s * max(1, config.trainer.max_lag):
        yield (
            f"a version is live {found.switch_s:.0f} s after its step, {config.trainer.max_lag} steps take "
            f"{found.step_s * config.trainer.max_lag:.0f} s: most of what is generated would be too old; raise "
            "trainer.max_lag, publish faster, or make a step larger (trainer.groups_per_step)"
        )
    if found.partitions_worth > PARTITIONS:
        yield (
            f"the log grows by {found.log_bytes_per_hour / 3600 / 1024**2:.0f} MiB/s, as much as "
            f"{found.partitions_worth} partitions take; a run has {PARTITIONS}: split it over "
            "several runs, or set generator.keep_text = false"
        )


def _compressed(value: bytes) -> int:
    return len(zstandard.ZstdCompressor().compress(value))


def _scores_of(row: Trajectory) -> ScoreRow:
    return ScoreRow(trajectory_id=row.trajectory_id, version_in=1, proximal=row.logprobs)


def _decision_of(row: Trajectory) -> DecisionRow:
    return DecisionRow(
        subject=Subject.TRAJECTORY,
        group_id=row.group_id,
        trajectory_id=row.trajectory_id,
        partition=0,
        offset=0,
        row=row.index_in_group,
        row_sha256=hashlib.sha256(row.trajectory_id.encode()).hexdigest(),
        decision=Decision.TRAINED,
        reason="",
        policy_lag=1,
        weight=1.0,
        use_count=1,
        reward=row.reward,
        advantage=0.5,
        completion_tokens=len(row.token_ids),
        consumed_at_us=5,
    )


def _sample_group(size: int, load: Workload) -> list[Trajectory]:
    """A group with tokens as unlike each other as text is: drawn by a power law, log-probabilities at random."""
    random = np.random.default_rng(0)
    request = group_id(GroupKey(run=run_id("plan"), prompt=0, epoch=0, attempt=0))
    worker, incarnation = WorkerId("worker-0"), Incarnation("0123456789ab")

    def tokens(count: int) -> IntArray:
        return np.minimum(random.zipf(1.3, max(count, 1)), load.vocabulary - 1).astype(np.int32)

    prompt = tokens(load.prompt_tokens)
    length = max(load.completion_tokens, 1)
    return [
        Trajectory(
            trajectory_id=trajectory_id(request, index),
            group_id=request,
            claim_id=claim_id(worker, incarnation, 0),
            prompt_id="prompt-000000",
            task="prompts",
            attempt=0,
            index_in_group=index,
            group_size=size,
            worker_id=worker,
            incarnation=incarnation,
            prompt_token_ids=prompt,
            token_ids=tokens(length),
            logprobs=-random.exponential(0.7, length).astype(np.float32),
            loss_mask=np.ones(length, dtype=np.bool_),
            segments=(Segment(version=1, length=length, proof=1),),
            sampling=Sampling(max_tokens=length),
            fingerprint=Fingerprint(tokenizer_digest="0" * 64, dtype="bfloat16", engine="vllm", engine_version="0"),
            finish_reason="stop",
            reward=float(index % 2),
            reward_function="reward@1",
            requested_at_us=1,
            started_at_us=2,
            finished_at_us=3,
            published_at_us=4,
        )
        for index in range(size)
    ]
