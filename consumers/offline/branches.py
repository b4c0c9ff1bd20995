"""The branches of a run, from the policy fold: where training went on from an older version, and what that left behind.

A branch start is a version with its parent's depth: the same weights under a new number. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.policy_fold import PolicyFold


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchStart:
    """Training went on from an older version."""

    version: int
    """its first number: the weights of `from_version`"""
    from_version: int
    left_versions: tuple[int, ...]
    """versions that stay in the log as another branch, ascending"""
    left_steps: int
    """training steps among them"""

    @property
    def words(self) -> str:
        """In a few words."""
        return f"version {self.version} goes on from version {self.from_version}; {left_words(self)}"


def branch_starts(fold: PolicyFold) -> tuple[BranchStart, ...]:
    """Every one, in the order in which they were made."""
    return tuple(
        leaving(fold, newest=number - 1, origin=state.event.parent, version=number)
        for number, state in sorted(fold.versions.items())
        if state.event.parent is not None and is_start(fold, number)
    )


def is_start(fold: PolicyFold, version: int) -> bool:
    """The version is the start of a branch: no training step was made for it."""
    state = fold.versions[version]
    return state.event.parent is not None and state.depth == fold.versions[state.event.parent].depth


def leaving(fold: PolicyFold, *, newest: int, origin: int, version: int) -> BranchStart:
    """What going on from `origin` as `version`, while `newest` is the newest version, leaves behind."""
    kept = set(fold.line(origin))
    left = tuple(sorted(number for number in fold.line(newest) if number not in kept))
    steps = sum(1 for number in left if not is_start(fold, number))
    return BranchStart(version=version, from_version=origin, left_versions=left, left_steps=steps)


def left_words(start: BranchStart) -> str:
    """What stays behind."""
    if not start.left_versions:
        return "nothing is left behind"
    steps = f"{start.left_steps} step{'' if start.left_steps == 1 else 's'}"
    stay = "stays" if len(start.left_versions) == 1 else "stay"
    return f"{version_words(start.left_versions)} ({steps}) {stay} in the log as another branch"


def version_words(versions: Sequence[int]) -> str:
    """Ascending numbers for a person.

    >>> version_words([4, 5, 6, 9])
    'versions 4-6, 9'
    """
    ranges: list[list[int]] = []
    for version in versions:
        if ranges and ranges[-1][1] == version - 1:
            ranges[-1][1] = version
        else:
            ranges.append([version, version])
    spelt = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"version{'' if len(versions) == 1 else 's'} {spelt}"
