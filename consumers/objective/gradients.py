"""Gradient norm and clipping, without an optimizer.

Guarantees that tied tensors count once and that a non-finite norm never scales anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from consumers.objective.shapes import InvalidSetting, NonFinite


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Total 2-norm of all gradients, before clipping: the metric grad_norm.

    parameters: tensors with or without .grad; one that occurs twice (tied weights) counts once.
    Returns a float32 scalar, 0 without gradients. A non-finite value means: make no step, leave
    parameters and optimizer state unchanged, count it. Over sharded ranks: the root of the
    all-reduced sum of squares.
    """
    norms = [torch.linalg.vector_norm(gradient.float()) for gradient in _gradients(parameters)]
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their norm is at most max_norm; tied ones once.

    norm: scalar from gradient_norm over the same parameters (all ranks). max_norm > 0. Nothing is
    touched when it is small enough. Raises InvalidSetting, NonFinite.

    Source: Pascanu et al. 2013 (1211.5063), algorithm 1. Departure: no epsilon beside the norm.
    """
    if not max_norm > 0:
        raise InvalidSetting(f"max_norm must be > 0, is {max_norm}")
    if not bool(torch.isfinite(norm)):
        raise NonFinite("gradient norm", 0, None)
    if float(norm) <= max_norm:
        return
    for gradient in _gradients(parameters):
        gradient.mul_(max_norm / float(norm))


def _gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each gradient once: a tied weight may be listed under two names, or as two tensors."""
    seen: set[tuple[object, ...]] = set()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.numel() == 0:
            continue
        key = (gradient.data_ptr(), tuple(gradient.shape), gradient.stride())
        if key not in seen:
            seen.add(key)
            yield gradient
