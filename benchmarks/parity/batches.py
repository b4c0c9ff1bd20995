"""The batches both sides get: the fixture of docs/objectives.md and random ones, and variants that provoke one effect.

Outside the mask our side gets NaN and the oracles get 0: they multiply with the mask, so NaN there would not tell
anything about the option that is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

ROWS, TOKENS, GROUP = 8, 12, 4
NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows of one optimizer step. Log-probabilities hold 0 outside the mask; see for_us."""

    name: str
    theta_BT: Tensor
    proximal_BT: Tensor
    behaviour_BT: Tensor
    reference_BT: Tensor
    entropy_BT: Tensor
    """nats per token; a leaf of its own, so that a bonus shows in the gradient"""
    mask_BT: Tensor
    advantages: Tensor
    """[B], or [B,T] in the variant token_advantages"""
    rewards_B: Tensor
    group_B: Tensor
    """int64 [B], equal sizes, members side by side: what TRL presumes"""
    group_size: int

    def to(self, dtype: torch.dtype) -> Batch:
        """All floats in one type."""
        changes = {
            item.name: value.to(dtype)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), Tensor) and value.is_floating_point()
        }
        return replace(self, **changes)

    def rows(self, start: int, stop: int) -> Batch:
        """A micro-batch."""
        changes = {
            item.name: value[start:stop]
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), Tensor)
        }
        return replace(self, **changes)

    def for_us(self, name: str) -> Tensor:
        """A token tensor with NaN wherever nothing counts."""
        return torch.where(self.mask_BT, getattr(self, name), NAN)


Variant = Callable[[Batch], Batch]


def same(batch: Batch) -> Batch:
    """No change."""
    return batch


def fixture() -> Batch:
    """The three rows of docs/objectives.md, as one group."""
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    theta_BT = torch.tensor([[-0.5, -1.0, -0.2, 0], [-0.7, 0, -1.5, -0.3], [-2.0, -0.4, 0, 0]])
    proximal_BT = torch.tensor([[-0.6, -1.2, -0.2, 0], [-0.6, 0, -1.4, -0.5], [-1.9, -0.5, 0, 0]])
    behaviour_BT = torch.tensor([[-0.9, -1.1, -0.1, 0], [-0.5, 0, -1.2, -1.5], [-1.0, -0.6, 0, 0]])
    reference_BT = torch.tensor([[-0.8, -0.9, -0.4, 0], [-0.6, 0, -1.0, -0.9], [-1.5, -0.7, 0, 0]])
    return Batch(
        name="F",
        theta_BT=theta_BT.double(),
        proximal_BT=proximal_BT.double(),
        behaviour_BT=behaviour_BT.double(),
        reference_BT=reference_BT.double(),
        entropy_BT=torch.where(mask_BT, 1.0 - theta_BT / 4, 0.0).double(),
        mask_BT=mask_BT,
        advantages=torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64),
        rewards_B=torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64),
        group_B=torch.zeros(3, dtype=torch.int64),
        group_size=3,
    )


def random_batch(seed: int) -> Batch:
    """Two groups of four rows of 3 to 12 tokens, a tool token in every other row, ratios that cross every bound."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths_B = torch.randint(3, TOKENS + 1, (ROWS,), generator=generator)
    mask_BT = torch.arange(TOKENS) < lengths_B[:, None]
    mask_BT[::2, 1] = False
    theta_BT = -noise(1.0, ROWS, TOKENS).abs() - 0.05
    proximal_BT = theta_BT + noise(0.15, ROWS, TOKENS)
    behaviour_BT = proximal_BT + noise(0.3, ROWS, TOKENS)
    # One token in eight has moved far, so that dual clip, delta, caps and bands all bind somewhere.
    far_BT = torch.rand(ROWS, TOKENS, generator=generator) < 1 / 8
    behaviour_BT = torch.where(far_BT, behaviour_BT - noise(1.5, ROWS, TOKENS), behaviour_BT)
    reference_BT = theta_BT + noise(0.5, ROWS, TOKENS)

    def masked(values_BT: Tensor) -> Tensor:
        return torch.where(mask_BT, values_BT, 0.0)

    return Batch(
        name=f"seed {seed}",
        theta_BT=masked(theta_BT),
        proximal_BT=masked(proximal_BT),
        behaviour_BT=masked(behaviour_BT),
        reference_BT=masked(reference_BT),
        entropy_BT=masked(noise(1.0, ROWS, TOKENS).abs()),
        mask_BT=mask_BT,
        advantages=noise(1.0, ROWS),
        rewards_B=torch.randint(0, 5, (ROWS,), generator=generator).double() / 2 + noise(0.1, ROWS),
        group_B=torch.arange(ROWS) // GROUP,
        group_size=GROUP,
    )


def dead_row(batch: Batch) -> Batch:
    """The last row has no counted token, as when it is withheld."""
    mask_BT = batch.mask_BT.clone()
    mask_BT[-1] = False
    return replace(batch, mask_BT=mask_BT)


def token_advantages(batch: Batch) -> Batch:
    """An advantage for every token."""
    steps_T = torch.linspace(0.5, 1.5, batch.mask_BT.shape[1], dtype=batch.advantages.dtype)
    return replace(batch, advantages=batch.advantages[:, None] * steps_T)


def far_reference(batch: Batch) -> Batch:
    """The first token of every row lies 11 nats below its reference: exp of it is 60,000."""
    reference_BT = batch.reference_BT.clone()
    reference_BT[:, 0] = batch.theta_BT[:, 0] + 11.0
    return replace(batch, reference_BT=reference_BT)


def near_reference(batch: Batch) -> Batch:
    """The reference within 2 nats: no implementation clamps there."""
    gap_BT = (batch.reference_BT - batch.theta_BT).clamp(-2.0, 2.0)
    return replace(batch, reference_BT=batch.theta_BT + gap_BT)


def far_tokens(batch: Batch) -> Batch:
    """The first token of every row has moved by 21 nats, and every advantage is negative: nothing clips it."""
    behaviour_BT = batch.behaviour_BT.clone()
    behaviour_BT[:, 0] = batch.theta_BT[:, 0] - 21.0
    return replace(batch, behaviour_BT=behaviour_BT, advantages=-batch.advantages.abs())


def far_rows(batch: Batch) -> Batch:
    """Every row has moved by 12 nats a token, and every advantage is negative."""
    behaviour_BT = torch.where(batch.mask_BT, batch.theta_BT - 12.0, 0.0)
    return replace(batch, behaviour_BT=behaviour_BT, advantages=-batch.advantages.abs())


def failed_reward(batch: Batch) -> Batch:
    """The reward function of the first member crashed."""
    rewards_B = batch.rewards_B.clone()
    rewards_B[0] = NAN
    return replace(batch, rewards_B=rewards_B)


def close_rewards(batch: Batch) -> Batch:
    """Rewards 5e-7 apart: less than the tolerance below which we call them equal."""
    steps_B = torch.arange(len(batch.rewards_B), dtype=batch.rewards_B.dtype) % 2
    return replace(batch, rewards_B=5e-7 * steps_B)


def one_group_of_one_token(batch: Batch) -> Batch:
    """All rows in one group, one token each."""
    mask_BT = torch.zeros_like(batch.mask_BT)
    mask_BT[:, 0] = True
    rows = len(batch.group_B)
    return replace(batch, mask_BT=mask_BT, group_B=torch.zeros_like(batch.group_B), group_size=rows)
