"""`--from-version N`: whether it can be done, what it gives up, and what the same words mean a second time.

Typed again while the newest version stands on a branch from N, they mean that branch: it is gone on with, or it is
done. So a command that a supervisor repeats branches once.
"""

from __future__ import annotations

from consumers.offline.branches import is_start, leaving, left_words
from consumers.trainer.branching import BranchWish
from schemas.errors import ConfigError
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus


def plan_branch(fold: PolicyFold, from_version: int, last_step: int) -> tuple[BranchWish | None, str]:
    """The wish to hand to the trainer, None when that branch is there already; and words for the user.

    `last_step` is run.versions: training ends at that depth. ConfigError says why it cannot be and what can."""
    _refuse_unknown(fold, from_version)
    newest = fold.newest
    assert newest is not None
    start = current_start(fold, from_version)
    if start is not None:
        return None, _again(fold, from_version, start, last_step)
    _refuse_unusable(fold, from_version, last_step)
    left = leaving(fold, newest=newest, origin=from_version, version=newest + 1)
    return BranchWish(from_version=from_version, when_newest=newest), (
        f"going on from version {from_version}: {left_words(left)}"
    )


def current_start(fold: PolicyFold, from_version: int) -> int | None:
    """The first number of the branch from that version that the newest version stands on; None when it does not.

    Behind a start that the trainer made itself (the version before had no optimizer state) the branch goes on."""
    current = fold.newest
    while current is not None:
        parent = fold.versions[current].event.parent
        if parent is not None and is_start(fold, current):
            if parent == from_version:
                return current
            if fold.versions[current - 1].event.has_state:
                return None
        current = parent
    return None


def _again(fold: PolicyFold, from_version: int, start: int, last_step: int) -> str:
    assert fold.newest is not None
    if not fold.ended or fold.versions[fold.newest].depth < last_step:
        return f"going on with the branch from version {from_version}, begun as version {start}"
    return (
        f"the branch from version {from_version} is done: it began as version {start} and ended with {fold.newest}. "
        f"For another one from the same weights say --from-version {start}; to train this one on, raise run.versions"
    )


def _refuse_unknown(fold: PolicyFold, version: int) -> None:
    if fold.newest is None:
        raise ConfigError(f"--from-version {version}: the run has no version yet; start it without that option")
    if version not in fold.versions:
        raise ConfigError(f"--from-version {version}: no such version; the run has versions 0-{fold.newest}")


def _refuse_unusable(fold: PolicyFold, version: int, last_step: int) -> None:
    state = fold.versions[version]
    usable = f"the newest version that can be used is {fold.last_with_state()}"
    if version == fold.newest:
        raise ConfigError(
            f"--from-version {version}: it is the newest version, training goes on from there anyway; "
            "leave the option out"
        )
    if state.status is VersionStatus.RETIRED:
        raise ConfigError(f"--from-version {version}: its weights are retired (checkpoints.keep); {usable}")
    if not state.event.has_state:
        raise ConfigError(
            f"--from-version {version}: it was saved without optimizer state (checkpoints.state_every); {usable}"
        )
    if state.depth >= last_step:
        raise ConfigError(
            f"--from-version {version}: {state.depth} training steps led to it and run.versions = {last_step}: "
            "nothing would be trained; raise run.versions"
        )


def branch_arguments(wish: BranchWish) -> tuple[str, ...]:
    """The wish as arguments of `driftlog train`."""
    return "--from-version", str(wish.from_version), "--when-newest", str(wish.when_newest)
