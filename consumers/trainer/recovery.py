"""Reads the trainer's committed state back from the log. The last control record of the ledger is the truth.

Guarantees: what is returned stood in the log together, and no other trainer wrote meanwhile as far as the log tells.
Whoever reads here has fenced every predecessor, so a transaction that lands behind the first look at the ledger is a
newer trainer's: Fenced. Damage (IllegalState) is declared only after a second reading says the same.
"""

from __future__ import annotations

from infra.policy_follower import PolicyFollower
from infra.ports import Clock, EventReader
from schemas.errors import Fenced, IllegalState, InvalidRecord, LogUnavailable
from schemas.headers import is_arrow
from schemas.ledger import AnyLedgerControl, StepCompleted, decode_ledger_control

_FIRST_LOOK_RECORDS = 16
_READ_LIMIT_S = 60.0


class CommittedState:
    """Steps through the two readings: policy to its end, and the tail of the ledger. Never waits.

    Call `advance` until it is True; all ends are taken after `TransactionalWriter.init` fenced our predecessor.
    """

    def __init__(self, follower: PolicyFollower, ledger: EventReader, ledger_topic: str, clock: Clock) -> None:
        self.control: AnyLedgerControl | None = None
        """None: the run has no committed transaction"""
        self._follower = follower
        self._ledger = ledger
        self._key = (ledger_topic, 0)
        self._clock = clock
        self._deadline_s = clock.monotonic_s() + _READ_LIMIT_S
        self._confirmed = False
        """topics that contradicted each other were read a second time"""
        # Whatever our predecessors wrote lies below: all of it was acknowledged, and is ended, before we look.
        self._mark = self._look_at_ends()
        self._look_back = _FIRST_LOOK_RECORDS
        self._seek()

    def _look_at_ends(self) -> int:
        """Where both topics end now, undecided records included; the end of the ledger.

        Not the end of what is decided: a coordinator that died inside a transaction hides everything behind it, and the
        ledger would be ahead of policy (a run that has ended would be ended again) until the broker gives it up. The
        ledger first: what a transaction wrote there before we looked has its policy record seen, or seen next time."""
        self._end = self._ledger.high_watermarks()[self._key]
        self._policy_end = self._follower.high_watermark()
        return self._end

    def _seek(self) -> None:
        self._start = max(0, self._end - self._look_back)
        self._ledger.seek(self._key[0], 0, self._start)

    def advance(self) -> bool:
        """Read a little; True when the state is complete. LogUnavailable when it takes too long, Fenced when a newer
        trainer has written since."""
        if self._clock.monotonic_s() > self._deadline_s:
            raise LogUnavailable(f"the committed state was not read within {_READ_LIMIT_S:.0f} s")
        self._follower.advance()
        self._read_ledger()
        if self._ledger.positions()[self._key] < self._end or self._follower.read_up_to < self._policy_end:
            return False
        if self.control is None and self._start > 0:
            # A tail of large steps: look twice as far back.
            self._look_back *= 2
            self._seek()
            return False
        # Policy may have been read further than the ledger: whatever it tells of a newer trainer lies in the ledger by
        # now, because the records of a transaction are all written before it commits.
        if self._ledger.high_watermarks()[self._key] > self._end:
            self._look_at_ends()
            return False
        problem = self._contradiction()
        if problem and not self._confirmed:
            # A newer trainer's transaction may have lain across the two looks: half of it was not there yet.
            self._confirmed = True
            self._look_at_ends()
            return False
        if problem:
            raise IllegalState(problem)
        return True

    def _read_ledger(self) -> None:
        for record in self._ledger.poll(100):
            if is_arrow(record.headers):
                continue
            try:
                self.control = decode_ledger_control(record.value)
            except InvalidRecord as error:
                raise IllegalState(f"ledger@{record.offset} cannot be read: {error}") from error
            if record.offset >= self._mark:
                raise Fenced(
                    f"ledger@{record.offset} was written after this trainer took over: a newer trainer owns the run; "
                    "stop for good"
                )

    def _contradiction(self) -> str:
        """What policy and ledger say against each other; "" when nothing."""
        fold = self._follower.fold
        if self.control is None and fold.segment is not None:
            return "policy has RunStarted but the ledger is empty: one of the topics was damaged"
        if self.control is not None and fold.newest is None:
            return "the ledger has transactions but policy names no version: one of the topics was damaged"
        if isinstance(self.control, StepCompleted) and self.control.version_out != fold.newest:
            return (
                f"the ledger ends with version {self.control.version_out}, policy with {fold.newest}: "
                "they are written in one transaction, so one of the topics was damaged"
            )
        return ""
