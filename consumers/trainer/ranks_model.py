"""A policy on this rank: whole, replicated (DDP) or sharded (FSDP2), behind one set of calls.

Every rank must make the same passes in the same order; a rank without rows passes `tensors.nothing` through.
Gradients are averaged over the ranks, which `Denominators.averaging_ranks` makes up for. What leaves for disk or
comes from it is always whole tensors under the model's own names, so the number of ranks may change in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from consumers.trainer.learner_lora import lora_layers
from consumers.trainer.policy_forward import ForwardSettings, completion_logprobs, score_rows
from consumers.trainer.ranks import Parallel, Ranks
from consumers.trainer.tensors import RowTensors
from infra.model import Policy, unique_tensors


class _Forward(torch.nn.Module):
    """The pass as a module, because DDP and FSDP hang their work on a module's call."""

    def __init__(self, model: Any, settings: ForwardSettings) -> None:
        super().__init__()
        self.model = model
        self._settings = settings

    def forward(self, tensors: RowTensors, *, gradient: bool, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """theta and entropy, [B,T]."""
        if gradient:
            return completion_logprobs(self.model, tensors, self._settings, entropy_gradient=entropy_gradient)
        return score_rows(self.model, tensors, self._settings)


class RankedModel:
    """One model of one rank. `parameters` are this rank's own: DTensors where it is sharded."""

    def __init__(
        self, policy: Policy, forward: ForwardSettings, ranks: Ranks, parallel: Parallel, *, trains: bool
    ) -> None:
        self.policy = policy
        self._ranks = ranks
        self._forward: Any = _Forward(policy.model, forward)
        self._replicas: Any = None
        self.sharded = parallel == "fsdp" and ranks.count > 1
        if self.sharded:
            _shard(self._forward, policy.model, ranks.count)
        elif ranks.count > 1 and trains:
            self._replicas = torch.nn.parallel.DistributedDataParallel(self._forward, forward_sync_buffers=False)
        self.parameters = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self._tensors = unique_tensors(policy.model)
        self._adapters = lora_layers(policy.model)

    # ------------------------------------------------------------ passes

    def logprobs(
        self, tensors: RowTensors, *, entropy_gradient: bool, last: bool
    ) -> tuple[Tensor, Tensor, contextlib.AbstractContextManager[Any]]:
        """theta and entropy with a gradient, and the context its backward pass belongs in.

        `last`: the last pass before the optimizer step: replicas add their gradients up then, and only then."""
        module = self._forward if self._replicas is None else self._replicas
        waits = self._replicas is not None and not last
        context = self._replicas.no_sync() if waits else contextlib.nullcontext()
        if waits:
            with self._replicas.no_sync():
                theta_BT, entropy_BT = module(tensors, gradient=True, entropy_gradient=entropy_gradient)
        else:
            theta_BT, entropy_BT = module(tensors, gradient=True, entropy_gradient=entropy_gradient)
        return theta_BT, entropy_BT, context

    @torch.no_grad()
    def score(self, tensors: RowTensors) -> Tensor:
        """Log-probabilities without a gradient."""
        scores_BT: Tensor = self._forward(tensors, gradient=False, entropy_gradient=False)[0]
        if self.sharded:
            self._forward.reshard()  # the root shard stays whole after a pass, waiting for a backward pass
        return scores_BT

    # ------------------------------------------------------------ gradients

    def local_gradients(self) -> list[Tensor]:
        """This rank's part of every parameter with its part of the gradient in `.grad`; shares memory with them."""
        if not self.sharded:
            return list(self.parameters.values())
        found = []
        for parameter in self.parameters.values():
            part = _local(parameter).detach()
            part.grad = None if parameter.grad is None else _local(parameter.grad)
            found.append(part)
        return found

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm over all ranks from the norm over `local_gradients`."""
        if not self.sharded:
            return norm
        squared = norm.double().square().reshape(1)
        return self._ranks.add(squared).sqrt()[0].float()

    # ------------------------------------------------------------ whole tensors

    def whole(self, tensor: Tensor, *, own: bool = False) -> Tensor:
        """The tensor with every rank's part, on the CPU. All ranks must ask.

        `own`: in memory of its own, so that training on does not change it."""
        full_tensor = getattr(tensor, "full_tensor", None)
        whole: Tensor = tensor if full_tensor is None else full_tensor()
        return whole.detach().contiguous().to("cpu", copy=own)

    def place(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, laid out as the parameter is."""
        moved = whole.to(parameter.device, parameter.dtype)
        if not self.sharded:
            return moved.clone()
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        # Every rank holds the whole tensor already: nothing is sent.
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)

    @torch.no_grad()
    def whole_tensors(self, *, own: bool = False) -> dict[str, Tensor]:
        """Every weight by name, tied ones once, adapters merged. All ranks must ask; all but rank 0 let go of each."""
        found = {}
        for name, tensor in self._served():
            whole = self.whole(tensor, own=own)
            if self._ranks.rank == 0:
                found[name] = whole
        return found

    def adapter_tensors(self, *, own: bool = False) -> dict[str, Tensor]:
        """What is trained of a model with adapters, by parameter name; nothing for one without."""
        return {name: self.whole(p, own=own) for name, p in self.parameters.items()} if self._adapters else {}

    def _served(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model as it is served."""
        merged = {f"{name}.weight": layer for name, layer in self._adapters.items()}
        for name, tensor in self._tensors.items():
            if name in merged:
                yield name, merged[name].merged_weight()
            elif not self._adapters or name not in self.parameters:
                yield name, tensor

    @torch.no_grad()
    def copy_in(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights by whole tensors."""
        for name, tensor in tensors.items():
            target = self._tensors[name]
            target.copy_(self.place(target, tensor) if _is_sharded(target) else tensor)

    @torch.no_grad()
    def copy_from(self, other: RankedModel) -> None:
        """Replace the weights by those of another model that is laid out alike, but for adapters."""
        for name, tensor in other._served():
            _local(self._tensors[name]).copy_(_local(tensor))


def _shard(forward: Any, model: Any, count: int) -> None:
    """FSDP2: one shard group a layer, the rest (embeddings, last norm) at the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(model.device.type, (count,))
    for layer in _layers(model.base_model):
        fully_shard(layer, mesh=mesh)
    fully_shard(forward, mesh=mesh)


def _layers(base: Any) -> Iterable[Any]:
    """The decoder's layers: `layers` in most models; otherwise its longest list of modules."""
    lists = [module for module in base.modules() if isinstance(module, torch.nn.ModuleList)]
    layers: Iterable[Any] = getattr(base, "layers", max(lists, key=len, default=()))
    return layers


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _local(tensor: Tensor) -> Tensor:
    if not _is_sharded(tensor):
        return tensor
    part: Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # to_local would make a new autograd view
    return part
