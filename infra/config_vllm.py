"""The table of the configuration for the vllm engine. None of it decides what is learnt: the last bits of a
log-probability at most, which the objective takes up as it does for any engine that is not the trainer's."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from infra.config_section import Section


class VllmSection(Section):
    """[vllm]; read where generator.engine or evaluation.engine is "vllm" (docs/vllm.md)"""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPU build: GPUs one engine is spread over"""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """GPU build: share of each GPU's memory for weights and cache together"""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """CPU build: cache of keys and values of one engine, GiB"""
    max_model_len: int = Field(default=0, ge=0)
    """longest prompt with its completion, and one token for the probe; 0: as many tokens as the model has positions"""
    max_sequences: int = Field(default=256, ge=1)
    """completions one engine computes at once; more wait"""
    enforce_eager: bool | None = None
    """no graph capture and no compilation; unset: on the CPU build only"""
    prefix_caching: bool = True
    """keep keys and values of prompts, emptied at every switch"""
    self_test: bool = True
    """at the start of an engine: switch to other weights and back, and look whether the numbers follow"""
    start_limit_s: float = Field(default=600.0, gt=0)
    """longest start of an engine"""
    load_limit_s: float = Field(default=300.0, gt=0)
    """longest swap of weights, and longest answer to a probe"""


def vllm_problems(vllm: VllmSection, engines: tuple[str, str], max_tokens: int) -> Iterator[str]:
    """What cannot work, in words. `engines`: of generator and evaluation."""
    if "vllm" not in engines:
        return
    # A prompt has at least one token, and one is kept for the probe.
    if vllm.max_model_len and vllm.max_model_len < max_tokens + 2:
        yield (
            f"vllm.max_model_len = {vllm.max_model_len} < task.max_tokens + 2 = {max_tokens + 2}: no prompt would fit "
            "before its completion; raise it, or leave it at 0"
        )
