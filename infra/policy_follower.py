"""Reads the policy topic into the one fold. Every service that must know the policy state owns one of these.

Guarantees: records are folded in log order and each once; an undecodable record is void, never fatal.
"""

from __future__ import annotations

import logging

from infra.logs import event
from infra.ports import EventReader
from schemas.errors import InvalidRecord
from schemas.policy_events import AnyPolicyEvent, decode_policy_event
from schemas.policy_fold import PolicyFold

log = logging.getLogger(__name__)


class PolicyFollower:
    """A fold and the reader that feeds it. The reader reads the policy topic from its beginning."""

    def __init__(self, reader: EventReader, topic: str, *, remember_versions: int = 256) -> None:
        self.fold = PolicyFold()
        self.undecodable = 0
        self._reader = reader
        self._topic = topic
        self._remember_versions = remember_versions
        self._target: int | None = None

    @property
    def read_up_to(self) -> int:
        """Next policy offset that is not folded; steps over markers."""
        return self.fold.read_up_to

    def advance(self, max_records: int = 500) -> list[tuple[int, AnyPolicyEvent, bool]]:
        """Fold what has arrived: (offset, event, is void) in order."""
        folded: list[tuple[int, AnyPolicyEvent, bool]] = []
        for record in self._reader.poll(max_records):
            try:
                policy_event = decode_policy_event(record.value)
            except InvalidRecord as error:
                self.undecodable += 1
                self.fold.skip_to(record.offset + 1)
                event(
                    log, "policy_record_undecodable", topic=record.topic, partition=record.partition,
                    offset=record.offset, reason=str(error),
                )  # fmt: skip
                continue
            void = self.fold.apply(record.offset, policy_event)
            if void is not None:
                event(
                    log, "policy_event_void", topic=record.topic, partition=record.partition, offset=void.offset,
                    type=void.type, reason=void.reason,
                )  # fmt: skip
            folded.append((record.offset, policy_event, void is not None))
        self.fold.skip_to(self._reader.positions()[(self._topic, 0)])
        if folded and self.fold.newest is not None:
            self.fold.forget_proofs_below(self.fold.newest - self._remember_versions)
        return folded

    def end_offset(self) -> int:
        """Ask the broker where the committed log ends now."""
        return self._reader.end_offsets()[(self._topic, 0)]

    def high_watermark(self) -> int:
        """Ask the broker where the log ends, undecided records included."""
        return self._reader.high_watermarks()[(self._topic, 0)]

    def is_blocked(self) -> bool:
        """An open transaction hides the end of the topic: time-outs must not be judged now."""
        key = (self._topic, 0)
        return self._reader.high_watermarks()[key] > self._reader.end_offsets()[key]

    def reached_start_end(self) -> bool:
        """Everything that was committed when this was first asked is folded (a worker may act only then)."""
        if self._target is None:
            self._target = self.end_offset()
        return self.read_up_to >= self._target
