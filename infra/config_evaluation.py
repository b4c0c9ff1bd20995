"""[evaluation]: the evaluator, a service beside training. None of it decides what is learnt."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.config_section import Section


class EvaluationSection(Section):
    """[evaluation]"""

    enabled: bool = False
    """`driftlog up` starts an evaluator; it takes processor time that training would have"""
    every_versions: int = Field(default=25, ge=1)
    """every K-th version that went live is evaluated, the first one included, and the newest when the run has ended"""
    prompts: Literal["held_out", "trained", "all"] = "held_out"
    """which prompts are asked; with task.kind = "prompts", held_out ones are those of evaluation.file"""
    file: str = ""
    """held-out prompts of your own, in the form of task.prompts"""
    max_prompts: int = Field(default=256, ge=1, le=100_000)
    """the first so many of them"""
    engine: Literal["hf", "vllm"] = "hf"
    """the evaluator has an engine of its own; vllm: with [vllm], and a processor or GPU beside the generators'"""
    greedy: bool = True
    """ask each prompt for its most probable answer"""
    samples_per_prompt: int = Field(default=4, ge=0, le=1024)
    """sampled answers of each prompt: pass@k for k = 1, 2, 4, ... up to that many; 0: none"""
    temperature: float = Field(default=1.0, gt=0)
    """of the sampled answers"""
    threads: int = Field(default=1, ge=1)
    end_limit_s: float = Field(default=120.0, gt=0)
    """how long the evaluator may go on after the run has ended; `driftlog up` waits for it that long"""


def evaluation_problems(evaluation: EvaluationSection, task_kind: str) -> list[str]:
    """What cannot work, in words."""
    found = []
    if not evaluation.greedy and not evaluation.samples_per_prompt:
        found.append(
            "evaluation.greedy = false and evaluation.samples_per_prompt = 0: nothing would be asked; "
            "set one of them, or evaluation.enabled = false"
        )
    if evaluation.file and task_kind != "prompts":
        found.append(f'evaluation.file goes with task.kind = "prompts"; {task_kind} brings its own held-out prompts')
    if evaluation.enabled and task_kind == "prompts" and not evaluation.file and evaluation.prompts != "trained":
        found.append(
            f'evaluation.prompts = "{evaluation.prompts}" needs evaluation.file: name held-out prompts there, '
            'or write evaluation.prompts = "trained"'
        )
    return found
