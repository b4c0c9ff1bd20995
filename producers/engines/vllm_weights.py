"""What of a checkpoint directory goes into vLLM: checked files, and the rows that the start-up test moves.

Guarantees: a directory of another model, or one that is not whole, is refused by name here, in the service's
own process, before vLLM hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from infra.model import DTYPES, Policy, check_static_files, load_skeleton, unique_tensors, weight_files
from infra.model_adapter import is_adapter, serving_tensors
from producers.engines.vllm_settings import Build
from schemas.checkpoint import WEIGHTS_NAME
from schemas.errors import CheckpointInvalid, UsageError

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""what vLLM's attention for CPUs is compiled for"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Whole tensors of one version, mapped from files."""

    files: Sequence[Path]
    """vLLM's workers read these; together they hold every tensor of `shapes`"""
    tensors: Mapping[str, torch.Tensor]
    scratch: TemporaryDirectory[str] | None = None
    """where `files` lie when they were made for this"""

    def release(self) -> None:
        """The workers have read the files."""
        if self.scratch is not None:
            self.scratch.cleanup()

    def narrows_to(self, dtype: str) -> bool:
        """Some tensor is published in another precision than it is served in."""
        return any(tensor.dtype != DTYPES[dtype] for tensor in self.tensors.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that vLLM is given; a tied copy is not among them."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def skeleton(directory: Path) -> Policy:
    """Names and shapes of the model, and its tokenizer. CheckpointInvalid."""
    try:
        return load_skeleton(directory)
    except UsageError as error:
        raise CheckpointInvalid(f"version directory cannot be served: {error}") from error


def checked_weights(policy: Policy, directory: Path, base: Path | None) -> Weights:
    """The directory's tensors, if it is whole and of this model. CheckpointInvalid names what is wrong.

    The one place where tensors of a directory are obtained. An adapter is joined with its base (`base`: this
    process's) here, by the function that joins it everywhere, and reaches vLLM as whole weights in a file."""
    check_static_files(policy, directory)
    tensors = serving_tensors(policy.model, directory, base)
    if not is_adapter(directory):
        return Weights(files=weight_files(directory), tensors=tensors)
    scratch = TemporaryDirectory(prefix="driftlog-merged-")
    merged = Path(scratch.name) / WEIGHTS_NAME
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, merged, metadata={"format": "pt"})
    return Weights(files=[merged], tensors=tensors, scratch=scratch)


def positions_of(policy: Policy) -> int:
    """Tokens the model can read at once."""
    return int(getattr(policy.model.config, "max_position_embeddings", 1 << 30))


def check_shape(policy: Policy, build: Build) -> None:
    """CheckpointInvalid for a model that this build of vLLM cannot compute: it would die at the first token."""
    config = policy.model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if build == "cpu" and head not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise CheckpointInvalid(
            f"the model's attention heads have {head} numbers; vllm's CPU build computes {sizes} only: use another "
            "model, or generator.engine = hf"
        )


def vocabulary_tensors(policy: Policy) -> tuple[str, ...]:
    """Tensors with one row a token: moving all their rows by one renames the tokens and changes nothing else."""
    ends = [policy.model.get_input_embeddings(), policy.model.get_output_embeddings()]
    owned = {id(tensor) for end in ends if end is not None for tensor in end.parameters(recurse=False)}
    return tuple(name for name, tensor in unique_tensors(policy.model).items() if id(tensor) in owned)


def change_is_visible(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], dtype: str) -> bool:
    """Some tensor differs in the served dtype. Stops at the first one: a step that learns moves nearly all."""
    served = DTYPES[dtype]
    return any(name not in old or not torch.equal(old[name].to(served), new[name].to(served)) for name in new)
