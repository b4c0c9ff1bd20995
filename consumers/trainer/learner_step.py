"""The optimizer steps of one training step, on one rank of any number.

Guarantees: the same loss and gradient for any split into micro-batches and ranks; a step without a usable gradient
leaves weights, optimizer and schedule bit-identical on every rank; all ranks take every decision alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from consumers.objective.aggregation import Denominators
from consumers.objective.corrections import has_mask
from consumers.objective.gradients import clip_gradients, gradient_norm
from consumers.objective.guards import check_step, worst_fresh_token
from consumers.objective.inputs import LossInputs
from consumers.objective.loss import policy_loss, step_denominators
from consumers.objective.shapes import ObjectiveError
from consumers.objective.statistics import PEAKS, SUMS, Tally
from consumers.trainer.learner_faults import named_errors
from consumers.trainer.learner_settings import LearnerSettings, learning_rate_at
from consumers.trainer.ranks import Ranks, deal
from consumers.trainer.ranks_model import RankedModel
from consumers.trainer.step_record import StepRecord
from consumers.trainer.tensors import (
    RowData,
    RowTensors,
    nothing,
    pack,
    row_tokens,
    split_by_budget,
    split_minibatches,
)
from infra.logs import event
from schemas.errors import IllegalState, StepRefused

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Counters:
    """What a training step counts on; in the checkpoint."""

    optimizer_step: int = 0
    training_step: int = 0
    skipped: int = 0
    """optimizer steps that were not made, whole run"""
    bad_in_row: int = 0
    """optimizer steps that were not made since the last one that was"""


class Updater:
    """Makes the optimizer steps. Built anew by every restore; the models and the optimizer are its owner's."""

    def __init__(
        self,
        settings: LearnerSettings,
        ranks: Ranks,
        model: RankedModel,
        reference: RankedModel | None,
        optimizer: Any,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._model = model
        self._reference = reference
        self._optimizer = optimizer
        self._counters = counters
        self._device = settings.device

    def score_first(self, record: StepRecord) -> bool:
        """Score all rows before any optimizer step where later ones, or a mask over several passes, need it."""
        several = self._passes(record.rows, range(len(record.rows))) > 1 or self._ranks.count > 1
        due = self._settings.optimizer_steps > 1 or (several and has_mask(self._settings.objective.correction))
        if due and record.rows:
            self.score(record, range(len(record.rows)))
        return due

    def run(self, record: StepRecord) -> None:
        """Epochs x minibatches optimizer steps."""
        settings, count = self._settings, len(record.rows)
        for epoch in range(settings.epochs if count else 0):
            dealt = split_minibatches(
                count, settings.minibatches, seed=settings.seed, step=self._counters.training_step, epoch=epoch
            )
            for chosen in dealt:
                self._optimizer_step(chosen, record)
        if not count:
            self._not_made(record, finite=True)
        self._counters.training_step += 1

    def score(self, record: StepRecord, chosen: Sequence[int]) -> None:
        """Proximal and reference scores of these rows, on every rank."""
        for tensors in self._micro_batches(record.rows, chosen):
            scores_BT = self._model.score(tensors)
            reference_BT = None if self._reference is None else self._reference.score(tensors)
            if tensors.is_real:
                record.add_proximal(tensors, scores_BT)
                if reference_BT is not None:
                    record.add_reference(tensors, reference_BT)
        record.share_scores(self._ranks, chosen)

    def scored(self, rows: Sequence[RowData]) -> StepRecord:
        """These rows with their scores, and nothing trained."""
        record = StepRecord(rows=rows)
        with named_errors(self._ranks, "scoring"):
            self.score(record, range(len(rows)))
        return record

    # ------------------------------------------------------------ one optimizer step

    def _optimizer_step(self, chosen: Sequence[int], record: StepRecord) -> None:
        """Forward, backward, step over these rows."""
        parts = self._micro_batches(record.rows, chosen)
        self._optimizer.zero_grad(set_to_none=True)
        denominators = self._denominators(parts, record)
        if denominators is not None and denominators.skipped:
            self._skip(chosen, record)
            return
        first, scored = record.tally is None, record.shared.issuperset(chosen)
        tally, fault = _no_tally(self._device), ""
        for place, tensors in enumerate(parts):
            inputs, context = self._inputs(tensors, record, scored=scored, last=place == len(parts) - 1)
            if denominators is None:
                # A mask needs proximal scores first; with one part they are the pass just made.
                denominators = self._summed(self._counted(inputs.proximal_BT, tensors))
                if denominators.skipped:
                    self._skip(chosen, record)
                    return
            try:
                outputs = policy_loss(inputs, self._settings.objective, denominators)
            except ObjectiveError as error:
                fault = self._note(error, fault)
                with context:
                    (inputs.theta_BT.sum() * 0).backward()  # type: ignore[no-untyped-call]
                continue
            with context:
                outputs.loss.backward()  # type: ignore[no-untyped-call]
            tally = tally + outputs.tally
            if first:
                record.add_ratios(outputs.log_ratio_N, outputs.mismatch_log_ratio_N, worst_fresh_token(inputs))
        assert denominators is not None
        record.share_scores(self._ranks, chosen)
        tally = self._agreed(tally, fault)
        if first:
            record.share_ratios(self._ranks)
            check_step(tally, self._settings.objective, denominators)
            record.tally = tally
        record.last_tally = tally
        self._apply_gradient(record)

    def _note(self, error: ObjectiveError, fault: str) -> str:
        """Alone, stop at once. Among ranks go through the passes, or the others would wait for this one's."""
        if self._ranks.count == 1:
            raise error
        return fault or str(error)

    def _agreed(self, tally: Tally, fault: str) -> Tally:
        """The tally of all ranks, or the refusal of the first that has one, on every rank."""
        if self._ranks.count == 1:
            return tally
        faults = [text.decode() for text in self._ranks.gather(fault.encode()) if text]
        if faults:
            raise StepRefused(f"training step refused: {faults[0]}")
        sums_K, peaks_K = tally.sums_K.cpu(), tally.peaks_K.cpu()
        return Tally(sums_K=self._ranks.add(sums_K), peaks_K=self._ranks.largest(peaks_K))

    def _apply_gradient(self, record: StepRecord) -> None:
        parts = self._model.local_gradients()
        norm = self._model.whole_norm(gradient_norm(parts))
        record.grad_norms.append(float(norm))
        if not bool(torch.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            self._not_made(record, finite=False)
            return
        clip_gradients(parts, norm, self._settings.max_grad_norm)
        record.learning_rate = learning_rate_at(self._settings, self._counters.optimizer_step)
        for group in self._optimizer.param_groups:
            group["lr"] = record.learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._counters.optimizer_step += 1
        self._counters.bad_in_row = 0
        record.made += 1

    def _skip(self, chosen: Sequence[int], record: StepRecord) -> None:
        # Not even a step on a zero gradient: momentum and weight decay would move the weights.
        if not record.shared.issuperset(chosen):
            self.score(record, chosen)
        self._not_made(record, finite=True)

    def _not_made(self, record: StepRecord, *, finite: bool) -> None:
        """Count an optimizer step that was not made; IllegalState when too many follow one another."""
        self._counters.skipped += 1
        self._counters.bad_in_row += 1
        record.masked += finite
        record.not_finite += not finite
        reason = "no token counted" if finite else "gradient not finite"
        in_row = self._counters.bad_in_row
        event(logger, "optimizer_step_skipped", level=logging.WARNING, reason=reason, in_row=in_row)
        if in_row < self._settings.max_bad_steps:
            return
        if finite:
            raise IllegalState(
                f"{in_row} optimizer steps in a row could not be made, the last because no token counted: every row is "
                "masked (cut off, rejected by the correction's band, or without a sampled token); look at "
                "response_length/clip_ratio and actor/rejected_fraction, or raise trainer.max_bad_steps"
            )
        raise IllegalState(
            f"{in_row} optimizer steps in a row could not be made, the last because its gradient was not finite: the "
            "run has diverged; go back to an earlier version with a smaller learning rate"
        )

    # ------------------------------------------------------------ parts of it

    def _denominators(self, parts: Sequence[RowTensors], record: StepRecord) -> Denominators | None:
        """Counts over all rows of the optimizer step; None where they must wait for the only part's forward pass."""
        counts = Denominators(tokens=0, rows=0, kept_tokens=0, averaging_ranks=self._ranks.count)
        for tensors in parts:
            known = tensors.rows[0] < 0 or record.has_proximal(tensors)
            if not known and has_mask(self._settings.objective.correction):
                return None
            # Without a mask the proximal numbers decide nothing, so the stored ones can stand in.
            real = known and tensors.rows[0] >= 0
            counts = counts + self._counted(record.proximal_of(tensors) if real else tensors.behaviour_BT, tensors)
        return self._summed(counts)

    def _counted(self, proximal_BT: torch.Tensor, tensors: RowTensors) -> Denominators:
        return step_denominators(
            proximal_BT,
            tensors.behaviour_BT,
            tensors.mask_BT,
            self._settings.objective,
            averaging_ranks=self._ranks.count,
        )

    def _summed(self, own: Denominators) -> Denominators:
        total = self._ranks.add(torch.tensor([own.tokens, own.rows, own.kept_tokens], dtype=torch.int64)).tolist()
        return replace(own, tokens=total[0], rows=total[1], kept_tokens=total[2])

    def _inputs(
        self, tensors: RowTensors, record: StepRecord, *, scored: bool, last: bool
    ) -> tuple[LossInputs, AbstractContextManager[Any]]:
        bonus = self._settings.objective.entropy_coefficient > 0
        theta_BT, entropy_BT, context = self._model.logprobs(tensors, entropy_gradient=bonus, last=last)
        reference_BT = None
        if self._reference is not None:
            scores_BT = tensors.behaviour_BT if scored else self._reference.score(tensors)
            if tensors.is_real and not scored:
                record.add_reference(tensors, scores_BT)
            reference_BT = record.reference_of(tensors) if tensors.is_real else torch.zeros_like(scores_BT)
        if tensors.is_real:
            record.add_proximal(tensors, theta_BT)
        inputs = LossInputs(
            theta_BT=theta_BT,
            proximal_BT=record.proximal_of(tensors) if tensors.is_real else torch.zeros_like(tensors.behaviour_BT),
            behaviour_BT=tensors.behaviour_BT,
            mask_BT=tensors.mask_BT,
            advantages=tensors.advantages_B,
            row_weights_B=tensors.weights_B,
            policy_lag_B=tensors.lags_B,
            reference_BT=reference_BT,
            entropy_BT=entropy_BT if bonus else entropy_BT.detach(),
            row_ids=tensors.row_ids,
        )
        return inputs, context

    def _passes(self, rows: Sequence[RowData], chosen: Sequence[int]) -> int:
        """Forward passes every rank makes over these rows: as many as the one with most work needs."""
        return max(len(parts) for parts in self._plan(rows, chosen))

    def _plan(self, rows: Sequence[RowData], chosen: Sequence[int]) -> list[list[list[int]]]:
        """Rank -> micro-batches -> rows."""
        lengths = [row_tokens(rows[row]) for row in chosen]
        plan = []
        for places in deal(lengths, self._ranks.count):
            parts = split_by_budget([lengths[place] for place in places], self._settings.micro_batch_tokens)
            plan.append([[chosen[places[place]] for place in part] for part in parts])
        return plan

    def _micro_batches(self, rows: Sequence[RowData], chosen: Sequence[int]) -> list[RowTensors]:
        """This rank's passes; filled up with passes over nothing where another rank has more."""
        plan = self._plan(rows, chosen)
        own = [
            pack(rows, part, self._device, mask_truncated=self._settings.mask_truncated)
            for part in plan[self._ranks.rank]
        ]
        missing = max(len(parts) for parts in plan) - len(own)
        return own + [nothing(self._device)] * missing


def _no_tally(device: str) -> Tally:
    return Tally(
        sums_K=torch.zeros(len(SUMS), dtype=torch.float64, device=device),
        peaks_K=torch.full((len(PEAKS),), -torch.inf, dtype=torch.float64, device=device),
    )
