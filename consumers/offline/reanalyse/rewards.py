"""Rewards judged anew, by another reward function, from what the log holds of a completion and its request.

A completion whose text was not kept is decoded from its tokens. A reward that fails is a failure with its cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from consumers.offline.reanalyse.stream import RecordedGroup
from consumers.offline.run_log import RequestEntry, RunLog
from consumers.offline.wholeness import refuse_newer
from infra.ports import Completion, RewardFunction
from schemas.ledger import Position
from schemas.trajectory import PromptRequest, Trajectory

Decode = Callable[[Sequence[int]], str]
"""token ids -> text; the run's own tokenizer"""


class RewardsAnew:
    """Scores each row once. Holds the requests of open groups, and the rewards of groups that may be used again."""

    def __init__(self, run_log: RunLog, function: RewardFunction, decode: Decode) -> None:
        self._function = function
        self._decode = decode
        self._run = run_log.run
        self._entries: Iterator[RequestEntry] = run_log.requests()
        self._requests: dict[str, PromptRequest] = {}
        self._known: dict[str, tuple[float | None, str | None]] = {}
        """trajectory id -> reward and failure"""
        self.scored = 0
        self.changed = 0
        self.failed: Counter[str] = Counter()
        """cause -> rows, the commonest kept"""

    @property
    def name(self) -> str:
        """name@version of the function."""
        return self._function.name

    def of(self, group: RecordedGroup, row: Trajectory) -> tuple[float | None, str | None]:
        """The new reward of a row."""
        if row.trajectory_id not in self._known:
            self._known[row.trajectory_id] = self._score(group.group_id, row)
        return self._known[row.trajectory_id]

    def known(self, row: Trajectory) -> float | None:
        """The new reward of a row that was scored before and may be used again; else the recorded one."""
        return self._known.get(row.trajectory_id, (row.reward, None))[0]

    def forget(self, position: Position) -> None:
        """What is decided by then, unless it may be used again."""
        still_open = {group.group_id for group in position.open_groups}
        kept = {group.group_id for group in position.replay}
        self._requests = {
            group_id: request
            for group_id, request in self._requests.items()
            if group_id in still_open or request.request_position >= position.next_request
        }
        self._known = {name: found for name, found in self._known.items() if name.rpartition("/")[0] in kept}

    def summary(self) -> dict[str, Any]:
        """What was judged; causes of failures, the commonest first."""
        return {
            "function": self.name,
            "scored": self.scored,
            "changed": self.changed,
            "failed": self.failed.total(),
            "causes": dict(self.failed.most_common(10)),
        }

    def _score(self, group_id: str, row: Trajectory) -> tuple[float | None, str | None]:
        request = self._request(group_id)
        if request is None:
            return self._failure("its request is not in the log")
        text = row.text if row.text is not None else self._decode(row.token_ids.tolist())
        completion = Completion(
            group_id=group_id,
            index_in_group=row.index_in_group,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            segments=row.segments,
            finish_reason=row.finish_reason,
            text=text,
            started_at_us=row.started_at_us,
            finished_at_us=row.finished_at_us,
            loss_mask=row.loss_mask,
        )
        reward = self._function.score(request, [completion])[0]
        self.scored += 1
        self.changed += reward.value != row.reward
        if reward.value is None:
            return self._failure(reward.error or "no reward")
        return reward.value, None

    def _failure(self, cause: str) -> tuple[None, str]:
        if cause in self.failed or len(self.failed) < 50:
            self.failed[cause] += 1
        else:
            self.failed["other causes"] += 1
        return None, cause

    def _request(self, group_id: str) -> PromptRequest | None:
        while group_id not in self._requests:
            entry = next(self._entries, None)
            if entry is None:
                return None
            if entry.request is None:
                refuse_newer(entry.problem, f"{self._run}.prompts[{entry.partition}]@{entry.offset}")
            else:
                self._requests[entry.request.group_id] = entry.request
        return self._requests[group_id]
