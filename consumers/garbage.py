"""Collects checkpoint directories that no event names: what crashed saves and unfinished transactions left behind.

Only the coordinator owns one of these: nobody else deletes. A round begins only when policy is folded to an end taken
when the round was due, so whatever committed before is known; what commits later was last written within the grace
time. Bounded work a call; a failure to delete is a warning, never a stop.
"""

from __future__ import annotations

import logging

from infra.logs import event
from infra.policy_follower import PolicyFollower
from infra.ports import CheckpointStore, Clock
from schemas.errors import CheckpointError
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus

log = logging.getLogger(__name__)

# A directory of a large model takes seconds to remove, and leases are judged by the same thread.
_AT_MOST = 4
_EVERY_S = 600.0


class GarbageRounds:
    """Call `step` whenever there is nothing better to do."""

    def __init__(self, store: CheckpointStore, clock: Clock, grace_s: float) -> None:
        self._store = store
        self._clock = clock
        self._grace_s = grace_s
        self._every_s = min(_EVERY_S, grace_s)
        self._due_s = clock.monotonic_s()
        self._barrier: int | None = None

    def restart(self) -> None:
        """Another fold is read from the beginning: the end that was taken means nothing to it."""
        self._barrier = None

    def step(self, follower: PolicyFollower) -> bool:
        """Remove a few directories if a round is due; True when it did."""
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s:
            return False
        if self._barrier is None:
            # Undecided records included: a version that hides behind an open transaction must be known first.
            self._barrier = follower.high_watermark()
        if follower.read_up_to < self._barrier:
            return False
        self._barrier = None
        self._due_s = now_s + self._every_s
        try:
            removed = self._store.collect_garbage(
                kept_uris(follower.fold), grace_s=self._grace_s, now_us=self._clock.now_us(), at_most=_AT_MOST
            )
        except (CheckpointError, OSError) as error:
            event(log, "garbage_not_collected", level=logging.WARNING, reason=str(error))
            return False
        if removed:
            event(log, "garbage_collected", directories=",".join(removed))
        if len(removed) == _AT_MOST:
            self._due_s = now_s  # there may be more
        return bool(removed)


def kept_uris(fold: PolicyFold) -> frozenset[str]:
    """Checkpoints that a version stands on. Those of retired versions are not among them unless a branch needs one:
    a deletion that failed is made up for here."""
    return frozenset(
        state.event.manifest_uri for state in fold.versions.values() if state.status is not VersionStatus.RETIRED
    )
