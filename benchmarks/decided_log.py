"""What a trainer writes beside trajectories: decisions, scores and StepCompleted, for logs that nobody trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from infra.ports import Message, Placed
from schemas.headers import control_headers
from schemas.ids import RunId
from schemas.ledger import (
    Decision,
    DecisionRow,
    PartitionProgress,
    Position,
    StepCompleted,
    Subject,
    encode_ledger_control,
)
from schemas.ledger_codec import decisions_headers, encode_decisions
from schemas.scores_codec import ScoreRow, encode_scores, scores_headers
from schemas.topics import TopicName, topic
from schemas.trajectory import Trajectory

Written = Sequence[tuple[Sequence[Trajectory], Placed]]
"""whole groups, and where each lies"""


class StepWriter:
    """The records of one training step after the other: each trains every row it is given."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._next_offset: dict[int, int] = {}
        self.version = 0

    def step(self, groups: Written) -> Iterator[Message]:
        """What its transaction would hold."""
        ledger, scores = topic(self._run, TopicName.LEDGER), topic(self._run, TopicName.SCORES)
        for rows, at in groups:
            self._next_offset[at.partition] = max(at.offset + 1, self._next_offset.get(at.partition, 0))
            scored = [
                ScoreRow(trajectory_id=t.trajectory_id, version_in=self.version, proximal=t.logprobs - np.float32(0.1))
                for t in rows
            ]
            value = encode_scores(scored)
            headers = scores_headers(scored, value, "bench", 1)
            yield Message(topic=scores, key=rows[0].group_id.encode(), value=value, headers=headers)
        decisions = [decision for rows, at in groups for decision in _decisions(rows, at)]
        value, key = encode_decisions(decisions), str(self.version + 1).encode()
        yield Message(topic=ledger, key=key, value=value, headers=decisions_headers(decisions, value, "bench"))
        control = self._completed(groups)
        value = encode_ledger_control(control)
        yield Message(topic=ledger, key=key, value=value, headers=control_headers(control, value, "bench"))
        self.version += 1

    def _completed(self, groups: Written) -> StepCompleted:
        partitions = {p: PartitionProgress(next_offset=end) for p, end in self._next_offset.items()}
        return StepCompleted(
            run=self._run, at_us=1, policy_read_up_to=0, version_in=self.version, version_out=self.version + 1,
            position=Position(open_groups=(), next_request=0, prompt_cursor=0, partitions=partitions),
            groups=len(groups), trajectories=sum(len(rows) for rows, _ in groups), batch_digest="b",
            metrics={f"bench/{number}": 1.0 for number in range(80)}, phase_s={}, rng_digest="r", config_digest="c",
            code_revision="bench",
        )  # fmt: skip


def _decisions(rows: Sequence[Trajectory], at: Placed) -> Iterator[DecisionRow]:
    for number, t in enumerate(rows):
        yield DecisionRow(
            subject=Subject.TRAJECTORY, group_id=t.group_id, trajectory_id=t.trajectory_id, partition=at.partition,
            offset=at.offset, row=number, row_sha256="ab" * 32, decision=Decision.TRAINED, reason="", policy_lag=0,
            weight=1.0, use_count=1, reward=1.0, advantage=0.5, completion_tokens=len(t.token_ids), consumed_at_us=1,
        )  # fmt: skip
    yield DecisionRow(
        subject=Subject.GROUP, group_id=rows[0].group_id, trajectory_id=None, partition=None, offset=None, row=None,
        row_sha256=None, decision=Decision.TRAINED, reason="", policy_lag=0, weight=1.0, use_count=1, reward=None,
        advantage=None, completion_tokens=None, consumed_at_us=1,
    )  # fmt: skip
