"""What the trainer understands of dead letters: prompts that kill workers. Pure."""

from __future__ import annotations

from infra.ports import Record
from schemas.headers import DEAD_CODE, DEAD_TOPIC, header_text
from schemas.ids import RunId
from schemas.ledger import Reason
from schemas.topics import TopicName, topic


def poisoned_group(record: Record, run: RunId) -> str | None:
    """The group whose request a worker gave up because others died over it; None for any other dead letter."""
    if header_text(record.headers, DEAD_CODE) != Reason.POISON_PROMPT.value:
        return None
    if header_text(record.headers, DEAD_TOPIC) != topic(run, TopicName.PROMPTS):
        return None
    return None if record.key is None else record.key.decode(errors="replace")
