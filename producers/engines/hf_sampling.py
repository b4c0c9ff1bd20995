"""Drawing one token a row: temperature, float32 log-softmax, inverse transform of a given uniform number.

Owns the random streams: a member's numbers are a pure function of (run seed, group id, index, length of its
context), so what it samples cannot depend on its neighbours, on the machine, or on how many numbers anyone drew before.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from producers.engines.members import refuse_sampling, stream_key
from schemas.trajectory import Sampling


def uniforms(
    run_seed: int, group_id: str, index: int, count: int, *, context_tokens: int = 0
) -> npt.NDArray[np.float64]:
    """[count] numbers in [0, 1) of one turn of one member; number t decides its token t.

    Departure from the usual generator objects: an extendable hash has no state to save, restore or share.
    """
    key = stream_key(run_seed, group_id, index, context_tokens)
    words = np.frombuffer(hashlib.shake_256(key).digest(8 * count), dtype="<u8")
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def check_sampling(sampling: Sampling) -> None:
    """Refuse what this engine does not do; ConfigError names the setting. Nothing is dropped silently."""
    refuse_sampling(sampling, ": engine hf samples from the whole distribution")


def draw(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row.

    token = the first v with cdf[v] > u, cdf of softmax(logits / temperature); its log-probability is under
    that same distribution, float32. Temperature 0: the most likely token (the first of equals), with its
    log-probability at temperature 1; such a row is for evaluation and refused by the trainer.

    Args: logits_BV [B, V]; temperature_B [B] float32; uniform_B [B] float64 in [0, 1).
    Returns: token_B [B] int64, logprob_B [B] float32.
    """
    greedy_B = temperature_B == 0.0
    scale_B = torch.where(greedy_B, 1.0, temperature_B)
    logprobs_BV = (logits_BV.float() / scale_B[:, None]).log_softmax(-1)
    # float64 sums: in float32 the tail of a large vocabulary would be rounded away.
    cdf_BV = logprobs_BV.double().exp().cumsum(-1)
    sampled_B = (cdf_BV <= uniform_B[:, None] * cdf_BV[:, -1:]).sum(-1).clamp_(max=logits_BV.shape[-1] - 1)
    token_B = torch.where(greedy_B, logprobs_BV.argmax(-1), sampled_B)
    return token_B, logprobs_BV.gather(-1, token_B[:, None]).squeeze(-1)
