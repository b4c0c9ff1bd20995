"""Log-probabilities of logged completions under other weights: the model is run over the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consumers.trainer.policy_forward import ForwardSettings, score_rows
from consumers.trainer.tensors import check_rows, pack, row_tokens, scored_data, split_by_budget
from infra.model_adapter import load_served
from schemas.errors import ConfigError
from schemas.scores_codec import ScoreRow
from schemas.trajectory import Trajectory


class Rescorer:
    """One model, held in memory; rows pass through it in micro-batches."""

    def __init__(
        self, directory: Path, *, base: Path | None = None, dtype: str, micro_batch_tokens: int, logprob_chunk: int
    ) -> None:
        """`base`: of versions that are adapters. `dtype`: of the forward pass; the weights are float32."""
        self._policy = load_served(directory, base)
        self._budget_tokens = micro_batch_tokens
        self._forward = ForwardSettings(chunk_tokens=logprob_chunk, autocast=dtype == "bfloat16")
        self._directory = directory
        self.scored = 0

    def scores(self, rows: Sequence[Trajectory], version_in: int) -> dict[str, ScoreRow]:
        """trajectory id -> log-probabilities of its tokens. ConfigError for tokens of another tokenizer."""
        for row in rows:
            if row.fingerprint.tokenizer_digest != self._policy.tokenizer_digest:
                raise ConfigError(
                    f"--model {self._directory}: its tokenizer is not the one {row.trajectory_id} was sampled with"
                )
        data = [scored_data(row) for row in rows]
        check_rows(data, self._policy.vocabulary_size)
        found: dict[str, ScoreRow] = {}
        for part in split_by_budget([row_tokens(row) for row in data], self._budget_tokens):
            tensors = pack(data, part, "cpu")
            logprobs_BT = score_rows(self._policy.model, tensors, self._forward)[0].numpy()
            for place, index in enumerate(part):
                proximal = logprobs_BT[place, : len(data[index].completion)].copy()
                found[data[index].row_id] = ScoreRow(
                    trajectory_id=data[index].row_id, version_in=version_in, proximal=proximal
                )
        self.scored += len(rows)
        return found
