"""[lora]: low-rank adapters in the place of whole weights. It decides the weights of a run, so it is fixed for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from pydantic import Field

from infra.config_section import Section
from infra.config_trainer import TrainerSection

ALL_LINEAR: Final = "all-linear"


class LoraSection(Section):
    """[lora]"""

    rank: int = Field(default=0, ge=0)
    """columns of an adapter; 0: off, every weight is trained"""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """an adapter's product counts alpha / rank times"""
    dropout: float = 0.0
    """must be 0: a training step draws no random numbers, or it could not be repeated"""
    target_modules: Literal["all-linear"] | list[str] = ALL_LINEAR
    """last parts of module names, such as ["q_proj", "v_proj"]; all-linear: every linear layer but the output's"""
    publish: Literal["merged", "adapter"] = "merged"
    """merged: each version is a whole model; adapter: the adapter alone, on a base that every worker must have"""


def lora_problems(lora: LoraSection, trainer: TrainerSection) -> Iterator[str]:
    """Every combination that cannot work, with the way out."""
    if lora.dropout != 0:
        yield (
            f"lora.dropout = {lora.dropout:g}: dropout is off everywhere (the step must be repeatable, and ratios of "
            "fresh rows must be 1); leave it at 0"
        )
    if lora.rank == 0:
        return
    if trainer.parallel == "fsdp":
        yield (
            f"trainer.parallel = 'fsdp' with lora.rank = {lora.rank}: adapters are not sharded; their optimizer state "
            'is small, so set trainer.parallel = "ddp"'
        )
    if not lora.target_modules:
        yield 'lora.target_modules is empty: nothing would be trained; name modules, or use "all-linear"'
