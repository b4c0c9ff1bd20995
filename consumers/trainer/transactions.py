"""The messages of a trainer transaction, in order. The policy record goes last: an open transaction hides
everything behind it in that partition, so it must be open as briefly as possible there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from consumers.trainer.batch import TrainerScores
from infra.ports import Message, Record
from schemas.errors import InvalidRecord
from schemas.headers import control_headers, dead_letter_headers
from schemas.ids import RunId
from schemas.ledger import AnyLedgerControl, DecisionRow, encode_ledger_control
from schemas.ledger_codec import decisions_headers, encode_decisions
from schemas.policy_events import AnyPolicyEvent, encode_policy_event
from schemas.prompt_codec import encode_request, request_headers
from schemas.scores_codec import ScoreRow, encode_scores, scores_headers
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import PromptRequest

SOURCE = "trainer"
GroupScores = tuple[str, Sequence[TrainerScores]]
"""(group id, scores of its trained rows)"""


@dataclass(slots=True, kw_only=True)
class Transaction:
    """Contents of one trainer transaction; `messages` puts them in order."""

    run: RunId
    control: AnyLedgerControl
    version_key: int
    """key of the ledger records: the version at hand"""
    decisions: Sequence[DecisionRow] = ()
    dead: Sequence[tuple[Record, InvalidRecord]] = ()
    scores: Sequence[GroupScores] = ()
    version_in: int = 0
    requests: Sequence[PromptRequest] = ()
    policy: Sequence[AnyPolicyEvent] = field(default_factory=tuple)

    def messages(self) -> list[Message]:
        """Dead letters, scores, decisions, control record, requests, policy events."""
        return [
            *(self._dead_letter(record, error) for record, error in self.dead),
            *(self._score(group, rows) for group, rows in self.scores),
            *self._ledger(),
            *(self._request(request) for request in self.requests),
            *(self._policy(event) for event in self.policy),
        ]

    def _dead_letter(self, record: Record, error: InvalidRecord) -> Message:
        headers = dead_letter_headers(
            record.headers, topic=record.topic, partition=record.partition, offset=record.offset, error=error
        )
        key = record.key or b""
        return Message(topic=topic(self.run, TopicName.DEADLETTERS), key=key, value=record.value, headers=headers)

    def _score(self, group_id: str, rows: Sequence[TrainerScores]) -> Message:
        score_rows = [
            ScoreRow(
                trajectory_id=row.trajectory_id,
                version_in=self.version_in,
                proximal=row.proximal,
                reference=row.reference,
            )
            for row in rows
        ]
        value = encode_scores(score_rows)
        headers = scores_headers(score_rows, value, SOURCE, self.control.at_us)
        return Message(topic=topic(self.run, TopicName.SCORES), key=group_id.encode(), value=value, headers=headers)

    def _ledger(self) -> list[Message]:
        name = topic(self.run, TopicName.LEDGER)
        key = str(self.version_key).encode()
        messages = []
        if self.decisions:
            value = encode_decisions(self.decisions)
            headers = decisions_headers(self.decisions, value, SOURCE)
            messages.append(Message(topic=name, key=key, value=value, headers=headers))
        value = encode_ledger_control(self.control)
        headers = control_headers(self.control, value, SOURCE)
        messages.append(Message(topic=name, key=key, value=value, headers=headers))
        return messages

    def _request(self, request: PromptRequest) -> Message:
        value = encode_request(request)
        return Message(
            topic=topic(self.run, TopicName.PROMPTS),
            key=request.group_id.encode(),
            value=value,
            headers=request_headers(request, value, SOURCE),
            partition=request.request_position % TOPICS[TopicName.PROMPTS].partitions,
        )

    def _policy(self, event: AnyPolicyEvent) -> Message:
        value = encode_policy_event(event)
        return Message(
            topic=topic(self.run, TopicName.POLICY),
            key=self.run.encode(),
            value=value,
            headers=control_headers(event, value, SOURCE),
        )
