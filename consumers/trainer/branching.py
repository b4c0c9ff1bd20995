"""Which older version training goes on from, if any. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import ConfigError, IllegalState
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchWish:
    """Go on from an older version; done once, so a restarted trainer does not branch again."""

    from_version: int
    when_newest: int
    """only while this is the newest version"""


def branch_origin(fold: PolicyFold, newest: int, wish: BranchWish | None) -> int | None:
    """The version to branch from: as asked for, or because the newest was saved without optimizer state.

    None: go on from the newest. ConfigError when the wish cannot be met, IllegalState when nothing can be restored.
    """
    if wish is not None and wish.when_newest == newest:
        state = fold.versions.get(wish.from_version)
        if state is None or state.status is VersionStatus.RETIRED or not state.event.has_state:
            raise ConfigError(
                f"cannot go on from version {wish.from_version}: it does not exist, its weights are retired, or it "
                f"was saved without optimizer state; the newest one that can be used is {fold.last_with_state()}"
            )
        return wish.from_version
    if fold.versions[newest].event.has_state:
        return None
    origin = fold.last_with_state()
    if origin is None:
        raise IllegalState("no version was saved with optimizer state: training cannot go on")
    return origin
