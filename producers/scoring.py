"""Groups that are sampled and wait for their rewards. Never waits itself: rewards may take as long as they do."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from infra.ports import Reward, RewardScorer
from producers.assembly import ClaimedGroup


class Scoring:
    """Between sampling and the outbox. Groups come out as their rewards come in, not in the order they went in."""

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        self._waiting: dict[str, tuple[ClaimedGroup, Future[Sequence[Reward]]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def group_ids(self) -> frozenset[str]:
        """Groups whose rewards are not in yet."""
        return frozenset(self._waiting)

    def put(self, group: ClaimedGroup) -> None:
        """A group whose members are all finished."""
        self._waiting[group.request.group_id] = (group, self._scorer.submit(group.request, group.in_order()))

    def take(self) -> list[tuple[ClaimedGroup, Sequence[Reward]]]:
        """Groups that are scored now."""
        scored = [(group, future.result(0.0)) for group, future in self._waiting.values() if future.done()]
        for group, _ in scored:
            del self._waiting[group.request.group_id]
        return scored

    def close(self) -> None:
        """Stop scoring."""
        self._scorer.close()
