"""C68: when a broker's "fenced" means another process, and when only that the transaction was too old."""

from __future__ import annotations

import pytest
from kafka import errors as kafka_errors

from infra import kafka_transactions
from infra.kafka_clients import KafkaSettings
from infra.kafka_transactions import KafkaTransactionalWriter
from infra.ports import Message
from schemas.errors import Fenced, TransactionFailed

LIMIT_S = 10.0
MESSAGES = [Message(topic="demo.policy", key=b"demo", value=b"{}")]


class Producers:
    """In place of Kafka's client: counts the identities taken, and the clients thrown away."""

    def __init__(self) -> None:
        self.made = 0
        self.abandoned = 0

    def build(self, *arguments: object) -> Producers:
        self.made += 1
        return self

    def init_transactions(self) -> None:
        """The broker gives the identity a new epoch."""

    def abandon(self, *arguments: object, limit_s: float) -> None:
        self.abandoned += 1


def refused(
    monkeypatch: pytest.MonkeyPatch, seconds: float, error: Exception
) -> tuple[KafkaTransactionalWriter, Producers]:
    """A writer whose transaction the broker refused that long after its begin; not asked to commit yet."""
    producers = Producers()

    class Refused:
        def __init__(self, *arguments: object) -> None:
            """Of the real one."""

        def run(self) -> None:
            raise error

        def seconds(self) -> float:
            return seconds

    monkeypatch.setattr(kafka_transactions, "build", producers.build)
    monkeypatch.setattr(kafka_transactions, "abandon", producers.abandon)
    monkeypatch.setattr(kafka_transactions, "_Transaction", Refused)
    settings = KafkaSettings(bootstrap_servers="127.0.0.1:1", transaction_timeout_s=LIMIT_S)
    writer = KafkaTransactionalWriter(settings, "demo-trainer")
    writer.init()
    return writer, producers


FENCINGS = [kafka_errors.InvalidProducerEpochError(), kafka_errors.ProducerFencedError()]


@pytest.mark.parametrize("error", FENCINGS, ids=lambda error: type(error).__name__)
def test_a_process_that_paused_longer_than_its_transaction_may_last_takes_its_identity_again_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """C68 (ii): the broker aborted it and raised the epoch: it looks like a fencing and is none."""
    writer, producers = refused(monkeypatch, 0.9 * LIMIT_S, error)

    with pytest.raises(TransactionFailed, match=r"9.0 s after its begin\); init, then re-read the log"):
        writer.commit(MESSAGES)
    writer.init()

    assert (producers.made, producers.abandoned) == (2, 1)


@pytest.mark.parametrize("error", FENCINGS, ids=lambda error: type(error).__name__)
def test_a_process_that_is_fenced_before_its_time_was_up_stops_for_good_and_asks_no_more(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """C68 (i): the broker had no reason of its own yet, so a newer process has the identity."""
    writer, producers = refused(monkeypatch, 0.9 * LIMIT_S - 0.01, error)

    for ask in (lambda: writer.commit(MESSAGES), lambda: writer.commit(MESSAGES), writer.init):
        with pytest.raises(Fenced, match="demo-trainer: a newer process owns this identity .* stop for good"):
            ask()

    assert (producers.made, producers.abandoned) == (1, 1)


def test_any_other_refusal_is_read_back_however_early_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = refused(monkeypatch, 0.1, kafka_errors.NotCoordinatorError())

    with pytest.raises(TransactionFailed, match="NotCoordinatorError"):
        writer.commit(MESSAGES)
