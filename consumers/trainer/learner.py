"""The learner on torch: one training step from a batch of trajectories, and its state on disk.

Guarantees: the objective sees stored behaviour log-probabilities, never recomputed ones; a step without a
usable gradient leaves weights, optimizer and schedule bit-identical; save + restore changes no later bit.
Under torchrun rank 0 is the Learner port and the other ranks run `serve`; every method here tells them first.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consumers.objective.kl import kl_in_reward
from consumers.trainer.batch import StepOutcome, TrainBatch, TrainerScores
from consumers.trainer.learner_faults import agreed, named_errors
from consumers.trainer.learner_lora import adapter_of, adapter_state, lora_record
from consumers.trainer.learner_metrics import row_metrics, update_metrics
from consumers.trainer.learner_restore import Restored, read_again, read_first
from consumers.trainer.learner_settings import LearnerSettings
from consumers.trainer.learner_state import (
    SavedState,
    TrainerState,
    load_optimizer,
    optimizer_tensors,
    set_torch_rng,
    torch_rng_text,
)
from consumers.trainer.learner_step import Counters, Updater
from consumers.trainer.policy_forward import ForwardSettings
from consumers.trainer.probe_selection import probe_rows
from consumers.trainer.probe_writer import probe_bytes
from consumers.trainer.ranks import OneRank, Ranks
from consumers.trainer.ranks_model import RankedModel
from consumers.trainer.ranks_wire import Command, decode_command, encode_command
from consumers.trainer.step_record import StepRecord, StopWatch
from consumers.trainer.tensors import RowData, check_rows, row_data, scored_data
from consumers.trainer.twin import Twin, may_have_a_twin
from infra.logs import event
from infra.model import dtype_groups, library_versions, tied_groups
from schemas.errors import CheckpointInvalid, ConfigError, IllegalState, RankLost, StepRefused
from schemas.trajectory import Trajectory

logger = logging.getLogger(__name__)


class HfLearner:
    """Learner on any transformers causal language model. State: weights, AdamW moments, counters."""

    def __init__(
        self,
        settings: LearnerSettings,
        monotonic_s: Callable[[], float] = time.perf_counter,
        ranks: Ranks | None = None,
    ) -> None:
        self._settings = settings
        self._monotonic_s = monotonic_s
        self._ranks = ranks or OneRank()
        self.warnings = settings.check_objective()
        """what is legal but worth knowing about the objective; for the start-up log"""
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self._forward = ForwardSettings(chunk_tokens=settings.logprob_chunk, autocast=settings.dtype == "bfloat16")
        self._model: RankedModel | None = None
        self._reference: RankedModel | None = None
        self._optimizer: Any = None
        self._probe_rows: tuple[Trajectory, ...] = ()
        self._twin: Twin | None = None
        self._counters = Counters()
        self._reference_version = settings.reference_version

    # ------------------------------------------------------------ the port

    def restore(self, directory: Path, *, with_state: bool) -> None:
        """Load weights, and optimizer, schedule and RNG state when asked; without it training starts afresh."""
        self._tell("restore", directory=str(directory), with_state=with_state)
        self._restore(directory, with_state=with_state)

    def train(self, batch: TrainBatch) -> StepOutcome:
        """One training step: scores, then epochs x minibatches optimizer steps."""
        watch = StopWatch(self._monotonic_s)
        rows = [row_data(row) for row in batch.rows]
        check_rows(rows, self.vocabulary_size())
        self._tell("train", rows, version=batch.version_in, depth=batch.depth_in)
        reference_version = self._reference_version
        record = self._train(rows, batch.version_in, batch.depth_in, watch)
        if rows:
            self._probe_rows = probe_rows(batch.rows, [record.proximal[place] for place in range(len(rows))])
        metrics = row_metrics(batch.rows) | update_metrics(record, self._settings, self.fingerprint(), batch.rows)
        metrics["training/optimizer_steps_skipped_total"] = float(self._counters.skipped)
        metrics["training/skipped_in_row"] = float(self._counters.bad_in_row)
        if self._reference is not None:
            metrics["reference/version"] = -1.0 if reference_version is None else float(reference_version)
        watch.lap("metrics")
        return StepOutcome(
            metrics=metrics,
            scores=[
                TrainerScores(
                    trajectory_id=row.row_id,
                    proximal=record.proximal[place],
                    reference=record.reference.get(place),
                )
                for place, row in enumerate(rows)
            ],
            optimizer_step=self._counters.optimizer_step,
            skipped=record.made == 0,
            rng_digest=self._state().rng_digest(),
            phase_s=watch.laps,
        )

    def reward_penalties(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        """What the divergence from the reference adds to each reward, <= 0 where the policy moved away; 0 when off."""
        if not self._settings.kl_in_reward or not trajectories:
            return [0.0] * len(trajectories)
        rows = [scored_data(trajectory) for trajectory in trajectories]
        check_rows(rows, self.vocabulary_size())
        record = self._score(rows, reference=True)
        beta = self._settings.objective.kl_coefficient
        with named_errors(self._ranks, "scoring for the divergence in the reward"):
            return [self._penalty(record, place, beta) for place in range(len(rows))]

    def save(self, directory: Path, *, with_state: bool = True) -> None:
        """Write model, config, tokenizer, probe, and (unless told otherwise) optimizer and RNG state."""
        self.begin_save(directory, with_state=with_state)()

    def begin_save(self, directory: Path, *, with_state: bool = True) -> Callable[[], None]:
        """Write all of it but the probe; what is returned computes and writes that, before training goes on."""
        return self._seen(with_state=with_state, own=False).begin_save(directory)

    def copy(self, *, with_state: bool = True) -> SavedState:
        """What `save` would write now; training on does not change it. Only the latest copy can be saved."""
        return self._seen(with_state=with_state, own=True)

    def manifest_fields(self) -> Mapping[str, Any]:
        """Manifest fields only the learner knows, of the present weights: right before as well as after `save`."""
        model = self._loaded().policy.model
        lora = self._settings.lora
        return {
            "lora": None if lora is None else lora_record(model, lora),
            "dtype": dtype_groups(model),
            "tied": tied_groups(model),
            "fingerprint": dict(self.fingerprint()),
            "optimizer_step": self._counters.optimizer_step,
            "library_versions": dict(library_versions()),
            "threads": self._settings.threads,
            "ranks": self._ranks.count,
            "device_type": torch.device(self._settings.device).type,
            "logprob_chunk": self._settings.logprob_chunk,
        }

    def fingerprint(self) -> Mapping[str, str]:
        """Parts that are compared with each trajectory's."""
        return {
            "tokenizer_digest": self._loaded().policy.tokenizer_digest,
            "dtype": self._settings.dtype,
            "engine": "hf",
            "engine_version": library_versions()["transformers"],
        }

    def vocabulary_size(self) -> int:
        """Token ids at or above this are refused."""
        return self._loaded().policy.vocabulary_size

    # ------------------------------------------------------------ other ranks

    def serve(self) -> None:
        """Not rank 0: do what rank 0 says until it says stop. RankLost when it, or another rank, is gone."""
        while True:
            command = decode_command(self._ranks.receive())
            if command.name == "stop":
                return
            try:
                self._do(command)
            except (StepRefused, IllegalState, CheckpointInvalid, ConfigError) as error:
                # Every rank comes to the same end; what follows from it is for rank 0 to say.
                event(logger, "rank_refused", level=logging.WARNING, rank=self._ranks.rank, reason=str(error))

    def close(self) -> None:
        """Send the other ranks home. Safe to call twice; the ranks themselves are their owner's to close."""
        if self._ranks.rank == 0:
            with contextlib.suppress(RankLost):
                self._tell("stop")
        self._ranks = OneRank()

    def _tell(self, name: str, rows: Sequence[RowData] = (), **arguments: Any) -> None:
        if self._ranks.count > 1:
            self._ranks.send(encode_command(Command(name=name, arguments=arguments, rows=rows)))

    def _do(self, command: Command) -> None:
        arguments = command.arguments
        if command.name == "restore":
            self._restore(Path(arguments["directory"]), with_state=arguments["with_state"])
        elif command.name == "train":
            self._train(command.rows, arguments["version"], arguments["depth"], StopWatch(self._monotonic_s))
        elif command.name == "score":
            self._score_here(command.rows, reference=arguments["reference"])
        elif command.name == "gather":
            self._weights()
            if arguments["with_state"]:
                self._gather_state()
        else:
            raise AssertionError(f"unknown command {command.name}")

    # ------------------------------------------------------------ on every rank

    def _restore(self, directory: Path, *, with_state: bool) -> None:
        settings = self._settings
        with named_errors(self._ranks, "restoring"):
            read = agreed(self._ranks, lambda: self._read(directory, with_state=with_state))
            if read.policy is not None:
                self._model = RankedModel(read.policy, self._forward, self._ranks, settings.parallel, trains=True)
            if read.reference is not None:
                self._reference = RankedModel(
                    read.reference, self._forward, self._ranks, settings.parallel, trains=False
                )
            model = self._loaded()
            model.copy_in(read.weights)
            if self._reference is not None:
                self._reference.copy_in(read.reference_weights)
            self._optimizer = torch.optim.AdamW(
                list(model.parameters.values()),
                lr=settings.learning_rate,
                betas=settings.betas,
                eps=settings.adam_epsilon,
                weight_decay=settings.weight_decay,
            )
            self._forget()
            if read.state is not None:
                load_optimizer(self._optimizer, model.parameters, directory, model.place)
                self._adopt(read.state)

    def _read(self, directory: Path, *, with_state: bool) -> Restored:
        if self._model is None:
            return read_first(directory, self._settings, with_state=with_state)
        reference = None if self._reference is None else self._reference.policy
        return read_again(
            directory,
            self._settings,
            self._model.policy,
            reference,
            self._reference_version,
            with_state=with_state,
        )

    def _train(self, rows: Sequence[RowData], version: int, depth: int, watch: StopWatch) -> StepRecord:
        updater, record = self._updater(), StepRecord(rows=rows)
        with named_errors(self._ranks, f"training on version {version}"):
            if updater.score_first(record):
                watch.lap("score")
            updater.run(record)
            every = self._settings.reference_refresh_every
            if self._reference is not None and every and (depth + 1) % every == 0:
                self._reference.copy_from(self._loaded())
                self._reference_version = version + 1
        watch.lap("update")
        return record

    def _score(self, rows: Sequence[RowData], *, reference: bool) -> StepRecord:
        self._tell("score", rows, reference=reference)
        return self._score_here(rows, reference=reference)

    def _score_here(self, rows: Sequence[RowData], *, reference: bool) -> StepRecord:
        return self._updater(reference=reference).scored(rows)

    def _seen(self, *, with_state: bool, own: bool) -> SavedState:
        """Everything of a checkpoint, in memory of its own or in the learner's."""
        model, lora = self._loaded(), self._settings.lora
        if model.sharded:
            self._tell("gather", with_state=with_state)
        probe: Callable[[], bytes] | None = None
        if own and may_have_a_twin(self._settings, self._ranks):
            self._twin = self._twin or Twin(model, self._settings, self._forward)
            weights, probe = self._twin.take(model, self._probe_rows)
        else:
            weights = self._weights(own=own)
        moments, reference = self._gather_state(own=own) if with_state else ({}, {})
        adapters = model.adapter_tensors(own=own)
        adapter = adapter_of(adapters, lora) if lora is not None and lora.publish == "adapter" else None
        return SavedState(
            policy=model.policy,
            adapters=adapter_state(adapters, lora) if lora is not None and adapter is None else {},
            adapter=adapter,
            weights=weights,
            moments=moments,
            reference=reference,
            state=self._state() if with_state else None,
            # A copy's here at the latest, and last: other ranks hear of it when they are through with the rest.
            probe=probe or (partial(bytes, self._probe_now()) if own else self._probe_now),
        )

    def _weights(self, *, own: bool = False) -> dict[str, torch.Tensor]:
        lora = self._settings.lora
        return {} if lora is not None and lora.publish == "adapter" else self._loaded().whole_tensors(own=own)

    def _gather_state(self, *, own: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Whole moments, and the reference where it is not the one of its directory."""
        model = self._loaded()
        moments = optimizer_tensors(self._optimizer, model.parameters, partial(model.whole, own=own))
        reference = self._reference if self._reference_version != self._settings.reference_version else None
        return moments, {} if reference is None else reference.whole_tensors(own=own)

    # ------------------------------------------------------------ small parts

    def _updater(self, *, reference: bool = True) -> Updater:
        used = self._reference if reference else None
        return Updater(self._settings, self._ranks, self._loaded(), used, self._optimizer, self._counters)

    def _penalty(self, record: StepRecord, place: int, beta: float) -> float:
        row = record.rows[place]
        counts = np.zeros_like(row.loss_mask) if self._settings.mask_truncated and row.truncated else row.loss_mask
        proximal_BT, reference_BT = (
            torch.from_numpy(store[place])[None] for store in (record.proximal, record.reference)
        )
        mask_BT = torch.from_numpy(counts.copy())[None]
        return float(kl_in_reward(proximal_BT, reference_BT, mask_BT, coefficient=beta)[0])

    def _probe_now(self) -> bytes:
        return probe_bytes(self.vocabulary_size(), self._probe_rows, partial(self._score, reference=False))

    def _loaded(self) -> RankedModel:
        if self._model is None:
            raise IllegalState("the learner holds no weights: restore a checkpoint first")
        return self._model

    def _state(self) -> TrainerState:
        return TrainerState(
            optimizer_step=self._counters.optimizer_step,
            training_step=self._counters.training_step,
            skipped_steps=self._counters.skipped,
            bad_steps_in_row=self._counters.bad_in_row,
            seed=self._settings.seed,
            torch_rng=torch_rng_text(),
            reference_version=self._reference_version,
        )

    def _forget(self) -> None:
        self._counters = Counters()
        self._reference_version = self._settings.reference_version
        self._probe_rows = ()

    def _adopt(self, state: TrainerState) -> None:
        set_torch_rng(state.torch_rng)
        self._counters = Counters(
            optimizer_step=state.optimizer_step,
            training_step=state.training_step,
            skipped=state.skipped_steps,
            bad_in_row=state.bad_steps_in_row,
        )
        if self._reference is not None and state.reference_version is not None:
            self._reference_version = state.reference_version
