"""What a request's sampling becomes for vLLM, and what is refused. Imports neither vllm nor torch.

Guarantees: nothing is dropped silently and nothing is added: end tokens, penalties and defaults of the model
directory are off, whatever they say. A member's seed is a pure function of (run seed, group id, index, tokens
that are there already), so what it samples does not depend on its neighbours but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from producers.engines.members import refuse_sampling, stream_key
from schemas.trajectory import Sampling


def check_sampling(sampling: Sampling) -> None:
    """Refuse what the trainer does not model; ConfigError names the setting.

    vLLM could do all of these, and would give log-probabilities of a distribution that the trainer's scores are
    not of: the ratio would be wrong at every token, and where the support is cut it would not even be bounded.
    """
    refuse_sampling(sampling, " changes the distribution in a way the trainer does not model")


def seed_of(run_seed: int, group_id: str, index: int, tokens_before: int) -> int:
    """The seed of one request: of a member's start (0 tokens before), or of where it goes on."""
    return int.from_bytes(stream_key(run_seed, group_id, index, tokens_before)[:8], "big") >> 1


def sampling_arguments(sampling: Sampling, *, max_tokens: int, seed: int) -> Mapping[str, Any]:
    """Keyword arguments of vLLM's SamplingParams for one member."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": seed,
        "max_tokens": max_tokens,
        "min_tokens": 0,
        "stop_token_ids": list(sampling.stop_token_ids),
        # Only the request's own stop tokens end a completion: the model's end token is one of them or it is not.
        "ignore_eos": True,
        # 0: of the sampled token alone
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }


def greedy_arguments(tokens: int) -> Mapping[str, Any]:
    """The likeliest tokens, exactly so many."""
    return sampling_arguments(Sampling(temperature=0.0), max_tokens=tokens, seed=0)


def scoring_arguments() -> Mapping[str, Any]:
    """Log-probabilities of the prompt's own tokens, at temperature 1; the one token behind them is thrown away."""
    return {**greedy_arguments(1), "prompt_logprobs": 0}
