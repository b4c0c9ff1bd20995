"""What one training step gathers on its way: scores by row, statistics, seconds by phase."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from consumers.objective.guards import WorstToken
from consumers.objective.statistics import Tally
from consumers.trainer.ranks import Ranks
from consumers.trainer.tensors import RowData, RowTensors

FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """Mutable; lives for one training step. What was shared is equal on every rank, the rest is this rank's own."""

    rows: Sequence[RowData]
    proximal: dict[int, FloatArray] = field(default_factory=dict)
    """row -> [T] under the weights at the start of the step"""
    reference: dict[int, FloatArray] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    """rows whose scores every rank has"""
    tally: Tally | None = None
    """of the first optimizer step"""
    last_tally: Tally | None = None
    log_ratios: list[torch.Tensor] = field(default_factory=list)
    mismatch_log_ratios: list[torch.Tensor] = field(default_factory=list)
    worst: WorstToken | None = None
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    made: int = 0
    """optimizer steps"""
    masked: int = 0
    """optimizer steps not made because nothing counted"""
    not_finite: int = 0
    """optimizer steps not made because the gradient was not finite"""

    def add_proximal(self, tensors: RowTensors, scores_BT: torch.Tensor) -> None:
        """Keep scores of rows that have none yet: the first ones are those before any optimizer step."""
        _keep(self.proximal, tensors, scores_BT)

    def add_reference(self, tensors: RowTensors, scores_BT: torch.Tensor) -> None:
        """Keep scores of the frozen reference."""
        _keep(self.reference, tensors, scores_BT)

    def has_proximal(self, tensors: RowTensors) -> bool:
        """Every row has proximal scores."""
        return all(row in self.proximal for row in tensors.rows)

    def has_reference(self, tensors: RowTensors) -> bool:
        """Every row has reference scores."""
        return all(row in self.reference for row in tensors.rows)

    def proximal_of(self, tensors: RowTensors) -> torch.Tensor:
        """[B,T] in the rows' order, 0 where nothing stands."""
        return _padded(self.proximal, tensors)

    def reference_of(self, tensors: RowTensors) -> torch.Tensor:
        """[B,T] in the rows' order, 0 where nothing stands."""
        return _padded(self.reference, tensors)

    def add_ratios(self, log_ratio_N: torch.Tensor, mismatch_N: torch.Tensor, worst: WorstToken | None) -> None:
        """Ratios of one micro-batch, for percentiles, and its worst lag-0 token."""
        self.log_ratios.append(log_ratio_N)
        self.mismatch_log_ratios.append(mismatch_N)
        if worst is not None and (self.worst is None or worst.ratio_error > self.worst.ratio_error):
            self.worst = worst

    # ------------------------------------------------------------ between ranks

    def share_scores(self, ranks: Ranks, chosen: Sequence[int]) -> None:
        """Give every rank the scores of these rows, each of which one rank has computed."""
        pending = [row for row in chosen if row not in self.shared]
        self.shared.update(pending)
        if ranks.count == 1 or not pending:
            return
        _share(ranks, self.proximal, pending, self.rows)
        # Scored together with the proximal ones, or nowhere.
        if int(ranks.largest(torch.tensor([len(self.reference)]))[0]):
            _share(ranks, self.reference, pending, self.rows)

    def share_ratios(self, ranks: Ranks) -> None:
        """Give every rank all collected ratios and the worst token."""
        if ranks.count == 1:
            return
        for values in (self.log_ratios, self.mismatch_log_ratios):
            own = torch.cat(values).cpu().numpy().tobytes() if values else b""
            values[:] = [torch.from_numpy(np.frombuffer(part, np.float32).copy()) for part in ranks.gather(own)]
        own = b"" if self.worst is None else json.dumps(asdict(self.worst)).encode()
        found = [WorstToken(**json.loads(part)) for part in ranks.gather(own) if part]
        self.worst = max(found, key=lambda worst: worst.ratio_error, default=None)


def _share(ranks: Ranks, store: dict[int, FloatArray], pending: Sequence[int], rows: Sequence[RowData]) -> None:
    """One sum over the ranks: 0 where a rank has no scores, so every bit survives."""
    lengths = [len(rows[row].completion) for row in pending]
    ends = np.cumsum(lengths)
    flat = np.zeros(int(ends[-1]), dtype=np.float32)
    for row, end, length in zip(pending, ends, lengths, strict=True):
        if row in store:
            flat[end - length : end] = store[row]
    summed = ranks.add(torch.from_numpy(flat)).numpy()
    for row, end, length in zip(pending, ends, lengths, strict=True):
        store[row] = summed[end - length : end].copy()


def _keep(store: dict[int, FloatArray], tensors: RowTensors, scores_BT: torch.Tensor) -> None:
    scores = scores_BT.detach().cpu().numpy()
    lengths = tensors.valid_BT.sum(dim=1).tolist()
    for place, row in enumerate(tensors.rows):
        if row not in store:
            store[row] = scores[place, : lengths[place]].copy()


def _padded(store: Mapping[int, FloatArray], tensors: RowTensors) -> torch.Tensor:
    padded = np.zeros((len(tensors.rows), tensors.width), dtype=np.float32)
    for place, row in enumerate(tensors.rows):
        padded[place, : len(store[row])] = store[row]
    return torch.from_numpy(padded).to(tensors.valid_BT.device)


class StopWatch:
    """Seconds by phase."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._last = monotonic_s()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Book the seconds since the last lap under this name."""
        now = self._monotonic_s()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
