"""The TransactionalWriter port on the in-memory log: one whole transaction a call, any doubt an exception."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from infra.ports import Message, Placed
from schemas.errors import Fenced, MessageTooLarge, TransactionFailed
from schemas.topics import MAX_MESSAGE_BYTES
from tests.fakes.memory_log import Place, message_bytes

if TYPE_CHECKING:
    from tests.fakes.memory_ports import MemoryClient


class MemoryTransactionalWriter:
    """The TransactionalWriter port."""

    def __init__(self, client: MemoryClient, transactional_id: str) -> None:
        self._client = client
        self._log = client.log
        self._id = transactional_id
        self._epoch: int | None = None
        self._fenced: Fenced | None = None

    def init(self) -> None:
        with self._client.call("transaction.init"):
            if self._fenced is not None:
                raise self._fenced
            self._epoch = None
            self._client.require_reachable(f"init of {self._id}")
            self._epoch = self._log.take_over(self._id)

    def commit(
        self, messages: Sequence[Message], *, group: str | None = None, offsets: Mapping[Place, int] | None = None
    ) -> Sequence[Placed]:
        if (offsets is None) != (group is None):
            raise ValueError("commit: group and offsets go together")
        with self._client.call("transaction.commit"):
            if self._fenced is not None:
                raise self._fenced
            if self._epoch is None:
                raise TransactionFailed(f"{self._id}: no transaction can begin: call init first")
            for message in messages:
                if message_bytes(message) > MAX_MESSAGE_BYTES:
                    raise MessageTooLarge(f"{message.topic} key {message.key!r}: nothing was written")
            if not self._client.reaches():
                self._epoch = None
                raise TransactionFailed(f"{self._id}: the broker is away; init, then re-read the log")
            try:
                return self._commit(self._epoch, messages, group, offsets or {})
            except Fenced as error:
                self._fenced, self._epoch = error, None
                raise
            except TransactionFailed:
                self._epoch = None
                raise

    def close(self) -> None:
        self._epoch = None

    def _commit(
        self, epoch: int, messages: Sequence[Message], group: str | None, offsets: Mapping[Place, int]
    ) -> list[Placed]:
        identity = self._log.identity(self._id)
        transaction = self._log.begin(self._id, epoch)
        try:
            placed = [self._log.append(message, transaction) for message in messages]
        except MessageTooLarge as error:
            self._log.end_transaction(identity, "aborted")
            raise MessageTooLarge(f"{error}; nothing was written") from error
        except BaseException:  # a caller's mistake: the client gives the transaction up
            self._log.end_transaction(identity, "aborted")
            self._epoch = None
            raise
        if group is not None:
            transaction.offsets[group] = {place: (offset, "") for place, offset in offsets.items()}
        with self._client.call("transaction.end"):
            if identity.open is not transaction:  # the hook let time pass, or a successor took over
                late = self._log.clock.monotonic_s() - transaction.begun_s >= 0.9 * self._log.transaction_timeout_s
                kind = TransactionFailed if late else Fenced
                raise kind(f"{self._id}: the transaction was aborted from outside")
            fate, self._log.next_commit = self._log.next_commit, None
            self._log.end_transaction(identity, fate or "committed")
        if fate is not None:
            raise TransactionFailed(f"{self._id}: outcome unknown; init, then re-read the log")
        return placed
