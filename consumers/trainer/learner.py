"""The learner on torch: one training step from a batch of trajectories, and its state on disk.

Guarantees: the objective sees stored behaviour log-probabilities, never recomputed ones; a step without a
usable gradient leaves weights, optimizer and schedule bit-identical; save + restore changes no later bit.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consumers.objective.aggregation import Denominators
from consumers.objective.corrections import has_mask
from consumers.objective.gradients import clip_gradients, gradient_norm
from consumers.objective.guards import check_step, worst_fresh_token
from consumers.objective.inputs import LossInputs
from consumers.objective.loss import policy_loss, step_denominators
from consumers.objective.statistics import Tally, step_metrics
from consumers.trainer.batch import BatchRow, StepOutcome, TrainBatch, TrainerScores
from consumers.trainer.learner_metrics import objective_metrics, quantile_metrics, row_metrics
from consumers.trainer.learner_settings import LearnerSettings, learning_rate_at
from consumers.trainer.learner_state import (
    TrainerState,
    load_optimizer,
    read_state,
    save_optimizer,
    set_torch_rng,
    torch_rng_text,
    write_state,
)
from consumers.trainer.policy_forward import ForwardSettings, check_head, completion_logprobs, score_rows
from consumers.trainer.probe_selection import ProbeCandidate, probe_candidates
from consumers.trainer.probe_writer import probe_bytes
from consumers.trainer.step_record import StepRecord, StopWatch
from consumers.trainer.tensors import RowTensors, pack, row_tokens, split_by_budget, split_minibatches
from infra.model import (
    Policy,
    apply_weights,
    check_static_files,
    dtype_groups,
    library_versions,
    load_policy,
    read_weights,
    save_weights,
    tied_groups,
)
from schemas.checkpoint import PROBE_NAME
from schemas.errors import ConfigError, IllegalState

logger = logging.getLogger(__name__)


class HfLearner:
    """Learner on any transformers causal language model. State: weights, AdamW moments, counters."""

    def __init__(self, settings: LearnerSettings, monotonic_s: Callable[[], float] = time.perf_counter) -> None:
        self._settings = settings
        self._monotonic_s = monotonic_s
        self.warnings = settings.check_objective()
        """what is legal but worth knowing about the objective; for the start-up log"""
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self._forward = ForwardSettings(chunk_tokens=settings.logprob_chunk, autocast=settings.dtype == "bfloat16")
        self._policy: Policy | None = None
        self._reference: Policy | None = None
        self._optimizer: Any = None
        self._probe: bytes | None = None
        self._probe_rows: tuple[ProbeCandidate, ...] = ()
        self._reset_counters()

    # ------------------------------------------------------------ the port

    def restore(self, directory: Path, *, with_state: bool) -> None:
        """Load weights, and optimizer, schedule and RNG state when asked; without it training starts afresh."""
        if self._policy is None:
            self._policy = self._first_load(directory)
        else:
            check_static_files(self._policy, directory)
            apply_weights(self._policy.model, read_weights(self._policy.model, directory))
        self._optimizer = torch.optim.AdamW(
            list(self._parameters().values()),
            lr=self._settings.learning_rate,
            betas=self._settings.betas,
            eps=self._settings.adam_epsilon,
            weight_decay=self._settings.weight_decay,
        )
        self._reset_counters()
        if with_state:
            state = read_state(directory)
            load_optimizer(self._optimizer, self._parameters(), directory)
            set_torch_rng(state.torch_rng)
            self._optimizer_step, self._training_step = state.optimizer_step, state.training_step
            self._skipped, self._bad_in_row = state.skipped_steps, state.bad_steps_in_row

    def train(self, batch: TrainBatch) -> StepOutcome:
        """One training step: scores, then epochs x minibatches optimizer steps."""
        policy, settings, rows = self._loaded(), self._settings, batch.rows
        self._probe = None
        watch = StopWatch(self._monotonic_s)
        record = StepRecord(rows=rows)
        if self._scores_first(rows):
            self._score_all(policy, rows, record)
            watch.lap("score")
        made = 0
        for epoch in range(settings.epochs if rows else 0):
            dealt = split_minibatches(
                len(rows), settings.minibatches, seed=settings.seed, step=self._training_step, epoch=epoch
            )
            for chosen in dealt:
                made += self._optimizer_step_on(policy, chosen, record)
        self._training_step += 1
        watch.lap("update")
        if rows:
            self._probe_rows = probe_candidates(rows, [record.proximal[place] for place in range(len(rows))])
        metrics = self._metrics(record, made)
        watch.lap("metrics")
        return StepOutcome(
            metrics=metrics,
            scores=[
                TrainerScores(
                    trajectory_id=str(row.trajectory.trajectory_id),
                    proximal=record.proximal[place],
                    reference=record.reference.get(place),
                )
                for place, row in enumerate(rows)
            ],
            optimizer_step=self._optimizer_step,
            skipped=made == 0,
            rng_digest=self._state().rng_digest(),
            phase_s=watch.laps,
        )

    def save(self, directory: Path, *, with_state: bool = True) -> None:
        """Write model, config, tokenizer, probe, and (unless told otherwise) optimizer and RNG state."""
        policy = self._loaded()
        save_weights(policy, directory)
        if with_state:
            save_optimizer(self._optimizer, self._parameters(), directory)
            write_state(self._state(), directory)
        (directory / PROBE_NAME).write_bytes(self._probe_of(policy))

    def manifest_fields(self) -> Mapping[str, Any]:
        """Manifest fields only the learner knows, of the present weights: right before as well as after `save`."""
        policy = self._loaded()
        return {
            "dtype": dtype_groups(policy.model),
            "tied": tied_groups(policy.model),
            "probe_sha256": hashlib.sha256(self._probe_of(policy)).hexdigest(),
            "fingerprint": dict(self.fingerprint()),
            "optimizer_step": self._optimizer_step,
            "library_versions": dict(library_versions()),
            "threads": self._settings.threads,
            "device_type": torch.device(self._settings.device).type,
            "logprob_chunk": self._settings.logprob_chunk,
        }

    def fingerprint(self) -> Mapping[str, str]:
        """Parts that are compared with each trajectory's."""
        return {"tokenizer_digest": self._loaded().tokenizer_digest, "dtype": self._settings.dtype}

    def vocabulary_size(self) -> int:
        """Token ids at or above this are refused."""
        return self._loaded().vocabulary_size

    # ------------------------------------------------------------ one optimizer step

    def _optimizer_step_on(self, policy: Policy, chosen: Sequence[int], record: StepRecord) -> int:
        """Forward, backward, step over these rows; 1 if the step was made, else 0."""
        parts = self._micro_batches(record.rows, chosen)
        self._optimizer.zero_grad(set_to_none=True)
        denominators = self._denominators(parts, record)
        if denominators is not None and denominators.skipped:
            return self._skip(policy, parts, record)
        first = record.tally is None
        tally: Tally | None = None
        for tensors in parts:
            inputs = self._inputs(policy, tensors, record)
            if denominators is None:
                # A mask needs proximal scores first; with one part they are the pass just made.
                denominators = step_denominators(
                    inputs.proximal_BT, inputs.behaviour_BT, inputs.mask_BT, self._settings.objective
                )
                if denominators.skipped:
                    return self._skip(policy, parts, record)
            outputs = policy_loss(inputs, self._settings.objective, denominators)
            outputs.loss.backward()  # type: ignore[no-untyped-call]
            tally = outputs.tally if tally is None else tally + outputs.tally
            if first:
                record.add_ratios(outputs.log_ratio_N, outputs.mismatch_log_ratio_N, worst_fresh_token(inputs))
        assert tally is not None and denominators is not None
        if first:
            check_step(tally, self._settings.objective, denominators)
            record.tally = tally
        record.last_tally = tally
        return self._apply_gradient(record)

    def _apply_gradient(self, record: StepRecord) -> int:
        parameters = list(self._parameters().values())
        norm = gradient_norm(parameters)
        record.grad_norms.append(float(norm))
        if not bool(torch.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            self._skipped += 1
            self._bad_in_row += 1
            logger.warning("gradient_not_finite in_row=%d", self._bad_in_row)
            if self._bad_in_row >= self._settings.max_bad_steps:
                raise IllegalState(
                    f"{self._bad_in_row} optimizer steps in a row had a non-finite gradient: the run has diverged; "
                    "go back to an earlier version with a smaller learning rate"
                )
            return 0
        clip_gradients(parameters, norm, self._settings.max_grad_norm)
        record.learning_rate = learning_rate_at(self._settings, self._optimizer_step)
        for group in self._optimizer.param_groups:
            group["lr"] = record.learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer_step += 1
        self._bad_in_row = 0
        return 1

    def _skip(self, policy: Policy, parts: Sequence[RowTensors], record: StepRecord) -> int:
        # Not even a step on a zero gradient: momentum and weight decay would move the weights.
        self._skipped += 1
        for tensors in parts:
            self._score(policy, tensors, record)
        return 0

    def _denominators(self, parts: Sequence[RowTensors], record: StepRecord) -> Denominators | None:
        """Counts over all parts of the step; None where they must wait for the only part's forward pass."""
        total: Denominators | None = None
        for tensors in parts:
            known = record.has_proximal(tensors)
            if not known and has_mask(self._settings.objective.correction):
                return None
            # Without a mask the proximal numbers decide nothing, so the stored ones can stand in.
            proximal_BT = record.proximal_of(tensors) if known else tensors.behaviour_BT
            counts = step_denominators(proximal_BT, tensors.behaviour_BT, tensors.mask_BT, self._settings.objective)
            total = counts if total is None else total + counts
        return total

    def _inputs(self, policy: Policy, tensors: RowTensors, record: StepRecord) -> LossInputs:
        bonus = self._settings.objective.entropy_coefficient > 0
        theta_BT, entropy_BT = completion_logprobs(policy.model, tensors, self._forward, entropy_gradient=bonus)
        record.add_proximal(tensors, theta_BT)
        reference_BT = None
        if self._reference is not None:
            if not record.has_reference(tensors):
                record.add_reference(tensors, score_rows(self._reference.model, tensors, self._forward)[0])
            reference_BT = record.reference_of(tensors)
        return LossInputs(
            theta_BT=theta_BT,
            proximal_BT=record.proximal_of(tensors),
            behaviour_BT=tensors.behaviour_BT,
            mask_BT=tensors.mask_BT,
            advantages=tensors.advantages_B,
            row_weights_B=tensors.weights_B,
            policy_lag_B=tensors.lags_B,
            reference_BT=reference_BT,
            entropy_BT=entropy_BT if bonus else entropy_BT.detach(),
            row_ids=tensors.row_ids,
        )

    # ------------------------------------------------------------ scoring

    def _scores_first(self, rows: Sequence[BatchRow]) -> bool:
        """Whether proximal scores need a pass of their own: later optimizer steps, or a mask over several parts."""
        if self._settings.optimizer_steps > 1:
            return True
        several = len(split_by_budget([row_tokens(row) for row in rows], self._settings.micro_batch_tokens)) > 1
        return several and has_mask(self._settings.objective.correction)

    def _score_all(self, policy: Policy, rows: Sequence[BatchRow], record: StepRecord) -> None:
        for tensors in self._micro_batches(rows, range(len(rows))):
            self._score(policy, tensors, record)

    def _score(self, policy: Policy, tensors: RowTensors, record: StepRecord) -> None:
        if not record.has_proximal(tensors):
            record.add_proximal(tensors, score_rows(policy.model, tensors, self._forward)[0])
        if self._reference is not None and not record.has_reference(tensors):
            record.add_reference(tensors, score_rows(self._reference.model, tensors, self._forward)[0])

    def _micro_batches(self, rows: Sequence[BatchRow], chosen: Sequence[int]) -> list[RowTensors]:
        parts = split_by_budget([row_tokens(rows[place]) for place in chosen], self._settings.micro_batch_tokens)
        return [
            pack(
                rows,
                [chosen[place] for place in part],
                self._settings.device,
                mask_truncated=self._settings.mask_truncated,
            )
            for part in parts
        ]

    # ------------------------------------------------------------ small parts

    def _metrics(self, record: StepRecord, made: int) -> dict[str, float]:
        metrics = row_metrics(record.rows)
        if record.tally is not None and record.last_tally is not None:
            # Ratios of the first optimizer step tell of the data; the later ones tell of drift inside the step.
            metrics |= objective_metrics(step_metrics(record.tally, self._settings.objective))
            metrics |= quantile_metrics(torch.cat(record.log_ratios), torch.cat(record.mismatch_log_ratios))
            if self._settings.optimizer_steps > 1:
                last = objective_metrics(step_metrics(record.last_tally, self._settings.objective))
                metrics |= {
                    f"{name}_last": last[name] for name in ("actor/ppo_kl", "actor/pg_clipfrac") if name in last
                }
        if record.grad_norms:
            metrics["actor/grad_norm"] = float(np.mean(record.grad_norms))
        metrics["actor/lr"] = record.learning_rate
        metrics["training/optimizer_steps"] = float(made)
        metrics["training/optimizer_steps_skipped_total"] = float(self._skipped)
        if record.worst is not None:
            metrics["mismatch/fresh_ratio_error_max"] = record.worst.ratio_error
            served = {row.trajectory.fingerprint.dtype for row in record.rows}
            if record.worst.exceeds and served | {self._settings.dtype} == {"float32"}:
                logger.warning("engine_and_trainer_disagree %s", record.worst)
        return metrics

    def _first_load(self, directory: Path) -> Policy:
        settings = self._settings
        policy = load_policy(directory, "float32", settings.device)
        check_head(policy.model)
        if settings.gradient_checkpointing:
            # It acts in training mode only; dropout is zero, so the mode changes nothing else.
            policy.model.gradient_checkpointing_enable()
            policy.model.train()
        if settings.reference_directory is not None:
            self._reference = load_policy(settings.reference_directory, "float32", settings.device)
            if self._reference.tokenizer_digest != policy.tokenizer_digest:
                raise ConfigError(f"learner.reference_directory {settings.reference_directory} has another tokenizer")
            self._reference.model.requires_grad_(False)
        return policy

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self._loaded().model.named_parameters() if p.requires_grad}

    def _probe_of(self, policy: Policy) -> bytes:
        # Kept until the weights move, so that the manifest and the file speak of the same bytes.
        if self._probe is None:
            self._probe = probe_bytes(policy, self._probe_rows, self._forward, self._settings.device)
        return self._probe

    def _loaded(self) -> Policy:
        if self._policy is None:
            raise IllegalState("the learner holds no weights: restore a checkpoint first")
        return self._policy

    def _state(self) -> TrainerState:
        return TrainerState(
            optimizer_step=self._optimizer_step,
            training_step=self._training_step,
            skipped_steps=self._skipped,
            bad_steps_in_row=self._bad_in_row,
            seed=self._settings.seed,
            torch_rng=torch_rng_text(),
        )

    def _reset_counters(self) -> None:
        self._optimizer_step = 0
        self._training_step = 0
        self._skipped = 0
        self._bad_in_row = 0
        self._probe_rows = ()
        self._probe = None
