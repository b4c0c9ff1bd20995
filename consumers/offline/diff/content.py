"""What is the same in two runs and what may differ: the content of a row and of a decision, without who and when.

Left out: names of run, worker, incarnation and claim, offsets, proofs, stamps of time, text and metadata (text follows
from the tokens, where it was kept at all). A group is known by prompt, epoch and attempt. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from schemas.ids import parse_group_id
from schemas.ledger import DecisionRow
from schemas.trajectory import Trajectory

GroupName = tuple[int, int, int]
"""(prompt, epoch, attempt)"""
Depth = Callable[[int], int | None]
"""version -> training steps along its parents"""

_DECISION = ("decision", "use_count", "policy_lag", "weight", "advantage")
"""what the row does not tell itself; a reward that differs from its row's is for the audit"""
_PLAIN = (
    "prompt_id", "task", "group_size", "finish_reason", "reward", "reward_parts", "reward_function", "reward_error",
)  # fmt: skip
_ARRAYS = ("prompt_token_ids", "token_ids", "logprobs", "loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedRow:
    """One place of a batch."""

    decision: DecisionRow
    trajectory: Trajectory

    @property
    def name(self) -> str:
        """Without the name of the run."""
        return f"{group_words(group_name(self.trajectory.group_id))}/{self.trajectory.index_in_group}"


def group_name(group_id: str) -> GroupName:
    """What a group id says beside the run."""
    key = parse_group_id(group_id)
    return key.prompt, key.epoch, key.attempt


def group_words(name: GroupName) -> str:
    """As in a group id."""
    return f"p{name[0]:06d}/e{name[1]}/a{name[2]}"


def row_differences(a: UsedRow, b: UsedRow, depth_a: Depth, depth_b: Depth) -> Iterator[tuple[str, Any, Any]]:
    """(field, in A, in B) of everything that differs; of an array the first place."""
    if a.name != b.name:
        yield "row", a.name, b.name
        return
    for name in _PLAIN:
        left, right = getattr(a.trajectory, name), getattr(b.trajectory, name)
        if left != right:
            yield name, left, right
    for name in _ARRAYS:
        found = array_difference(getattr(a.trajectory, name), getattr(b.trajectory, name))
        if found is not None:
            yield f"{name}{found[0]}", found[1], found[2]
    for name, left, right in (
        ("segments", _segments(a.trajectory, depth_a), _segments(b.trajectory, depth_b)),
        *_parts("sampling", a.trajectory.sampling, b.trajectory.sampling),
        *_parts("fingerprint", a.trajectory.fingerprint, b.trajectory.fingerprint),
        *((name, getattr(a.decision, name), getattr(b.decision, name)) for name in _DECISION),
    ):
        if left != right:
            yield name, left, right


def array_difference(a: Any, b: Any) -> tuple[str, Any, Any] | None:
    """("[place]", in A, in B), or the lengths; bit for bit."""
    if len(a) != len(b):
        return " (length)", len(a), len(b)
    same = a.view(np.uint8) == b.view(np.uint8)
    if bool(same.all()):
        return None
    place = int(np.argmin(same)) // a.dtype.itemsize
    return f"[{place}]", a[place].item(), b[place].item()


def _segments(row: Trajectory, depth: Depth) -> list[list[int | None]]:
    """[training steps of the version, tokens] each: numbers of versions differ where a run branched."""
    return [[depth(segment.version), segment.length] for segment in row.segments]


def _parts(name: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    left, right = asdict(a), asdict(b)
    yield from ((f"{name}.{key}", left[key], right[key]) for key in left)
