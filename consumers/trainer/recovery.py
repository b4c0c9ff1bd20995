"""Reads the trainer's committed state back from the log. The last control record of the ledger is the truth."""

from __future__ import annotations

from infra.policy_follower import PolicyFollower
from infra.ports import Clock, EventReader
from schemas.errors import IllegalState, InvalidRecord, LogUnavailable
from schemas.headers import is_arrow
from schemas.ledger import AnyLedgerControl, StepCompleted, decode_ledger_control

_FIRST_LOOK_RECORDS = 16
_READ_LIMIT_S = 60.0


class CommittedState:
    """Steps through the two readings: policy to its end, and the tail of the ledger. Never waits.

    Call `advance` until it is True; both ends are taken after `TransactionalWriter.init` fenced our predecessor.
    """

    def __init__(self, follower: PolicyFollower, ledger: EventReader, ledger_topic: str, clock: Clock) -> None:
        self.control: AnyLedgerControl | None = None
        """None: the run has no committed transaction"""
        self._follower = follower
        self._ledger = ledger
        self._key = (ledger_topic, 0)
        self._clock = clock
        self._deadline_s = clock.monotonic_s() + _READ_LIMIT_S
        # Not the end of what is decided: a coordinator that died inside a transaction hides everything behind it, and
        # the ledger would be ahead of policy (a run that has ended would be ended again) until the broker gives it up.
        self._policy_end = follower.high_watermark()
        self._end = ledger.end_offsets()[self._key]
        self._look_back = _FIRST_LOOK_RECORDS
        self._seek()

    def _seek(self) -> None:
        self._start = max(0, self._end - self._look_back)
        self._ledger.seek(self._key[0], 0, self._start)

    def advance(self) -> bool:
        """Read a little; True when the state is complete. LogUnavailable when it takes too long."""
        if self._clock.monotonic_s() > self._deadline_s:
            raise LogUnavailable(f"the committed state was not read within {_READ_LIMIT_S:.0f} s")
        self._follower.advance()
        for record in self._ledger.poll(100):
            if is_arrow(record.headers):
                continue
            try:
                self.control = decode_ledger_control(record.value)
            except InvalidRecord as error:
                raise IllegalState(f"ledger@{record.offset} cannot be read: {error}") from error
        if self._ledger.positions()[self._key] < self._end or self._follower.read_up_to < self._policy_end:
            return False
        if self.control is None and self._start > 0:
            # A tail of large steps: look twice as far back.
            self._look_back *= 2
            self._seek()
            return False
        self._check()
        return True

    def _check(self) -> None:
        fold = self._follower.fold
        if self.control is None and fold.segment is not None:
            raise IllegalState("policy has RunStarted but the ledger is empty: one of the topics was damaged")
        if self.control is not None and fold.newest is None:
            raise IllegalState("the ledger has transactions but policy names no version: one of the topics was damaged")
        if isinstance(self.control, StepCompleted) and self.control.version_out != fold.newest:
            raise IllegalState(
                f"the ledger ends with version {self.control.version_out}, policy with {fold.newest}: "
                "they are written in one transaction, so one of the topics was damaged"
            )
