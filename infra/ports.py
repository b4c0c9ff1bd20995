"""The ports: what the services need from the outside world, and what each may promise.

Adapters: Kafka in infra/kafka_*, the in-memory log of the tests in tests/fakes/memory_log. One contract
suite (tests/contract) holds both to this page.

Offsets. An offset is always the NEXT record to read: `position` 42 means 41 was handed out. Positions step
over transaction markers and aborted records, so `position >= end` is the test for "has read everything",
never "offset of the last record + 1".

Time-outs. Every call that can wait takes or states a limit and raises LogUnavailable after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from infra.checkpoint_port import CheckpointStore as CheckpointStore
from infra.checkpoint_port import SavedCheckpoint as SavedCheckpoint
from infra.checkpoint_port import Write as Write
from infra.engine_port import Completion as Completion
from infra.engine_port import EngineRequest as EngineRequest
from infra.engine_port import GenerationEngine as GenerationEngine
from infra.engine_port import Reward as Reward
from infra.tracker_port import ExperimentTracker as ExperimentTracker
from schemas.trajectory import PromptRequest, Sampling

Headers = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record as it lies in the log."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    """broker or producer time, by the topic's setting"""

    def header(self, name: str) -> bytes | None:
        """The last header of that name, or None."""
        return next((value for key, value in reversed(self.headers) if key == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One record to be written."""

    topic: str
    key: bytes
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    """None: by key (murmur2, as every Kafka client does)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a record was written."""

    partition: int
    offset: int


class Clock(Protocol):
    """Time, passed in so that a test can own it."""

    def now_us(self) -> int:
        """Wall clock, microseconds since 1970 UTC. For stamps only; never subtract two processes' stamps to decide."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back. For time-outs."""
        ...


class EventReader(Protocol):
    """Reads whole topics (all their partitions) from given offsets, committed records only.

    A reader thread fills a bounded queue; `poll` never waits. Not thread-safe.
    """

    def poll(self, max_records: int) -> Sequence[Record]:
        """What has arrived, at most max_records, in offset order per partition. Empty: nothing is there now."""
        ...

    def positions(self) -> Mapping[tuple[str, int], int]:
        """Per (topic, partition): every committed record below was handed out by `poll`. Steps over markers."""
        ...

    def end_offsets(self) -> Mapping[tuple[str, int], int]:
        """Ask the broker for the last stable offset of each partition. At most `request_timeout_s`; LogUnavailable."""
        ...

    def high_watermarks(self) -> Mapping[tuple[str, int], int]:
        """Ask the broker for the end including open transactions; above end_offsets while one is open."""
        ...

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on reading there; what is queued of that partition is forgotten. Below the start of the log: an
        IllegalState that names the missing range, on the next poll."""
        ...

    def close(self) -> None:
        """Stop the thread and leave. Safe to call twice."""
        ...


class GroupReader(Protocol):
    """A member of a consumer group: partitions come and go. Not thread-safe; `poll` never waits."""

    def poll(self, max_records: int) -> Sequence[Record]:
        """Records of owned partitions, from the committed offset (or the start). Queued records of a revoked
        partition are dropped before this returns."""
        ...

    def assignment(self) -> frozenset[int]:
        """Partitions owned now (of the single topic)."""
        ...

    def committed(self, partition: int) -> tuple[int, str] | None:
        """(offset, metadata) the group has committed for an owned partition when it was assigned, or None."""
        ...

    def commit(self, offsets: Mapping[int, tuple[int, str]]) -> None:
        """Queue a commit of (next offset, metadata) per partition; unowned partitions are left out silently.
        Done in the background, at least once; a failed commit is repeated by the next one."""
        ...

    def leave(self) -> None:
        """Give the partitions back (a worker that lost its standing); `rejoin` takes part again."""
        ...

    def rejoin(self) -> None:
        """Take part again. Idempotent."""
        ...

    def close(self) -> None:
        """Leave the group and stop. Safe to call twice."""
        ...


class Delivery(Protocol):
    """What became of one sent record."""

    def done(self) -> bool:
        """Acknowledged or failed."""
        ...

    def result(self, timeout_s: float) -> Placed:
        """Where it lies. Raises DeliveryFailed, MessageTooLarge, Fenced or LogUnavailable (limit reached)."""
        ...


class EventWriter(Protocol):
    """Idempotent writer, acks=all. Thread-safe."""

    def send(self, message: Message) -> Delivery:
        """Queue one record. BudgetExhausted when in_flight_bytes would exceed the bound (nothing is queued then);
        MessageTooLarge at once when no setting could let it pass. Never retried by callers: the client does."""
        ...

    def in_flight_bytes(self) -> int:
        """Bytes sent and not acknowledged."""
        ...

    def close(self, timeout_s: float) -> int:
        """Wait for deliveries at most that long; the number of records NOT delivered."""
        ...


class TransactionalWriter(Protocol):
    """One whole transaction a call. Any doubt is an exception; after TransactionFailed call `init` again.

    Uses: `<run>-trainer`, `<run>-coordinator`. A newer `init` with the same id fences this writer for good.
    """

    def init(self) -> None:
        """Fence predecessors, end their open transaction. Must be called before anything is read that a
        decision will stand on. Also the way back after TransactionFailed (rebuilds the client)."""
        ...

    def commit(
        self,
        messages: Sequence[Message],
        *,
        group: str | None = None,
        offsets: Mapping[tuple[str, int], int] | None = None,
    ) -> Sequence[Placed]:
        """Write all messages in order, all or none, and mirror `offsets` (next offsets) to `group`.

        Raises Fenced (exit 3), MessageTooLarge (nothing was written), TransactionFailed (aborted or unknown:
        call `init`, re-read the committed state)."""
        ...

    def close(self) -> None:
        """Safe to call twice."""
        ...


class LogAdmin(Protocol):
    """Creation and questions about topics."""

    def create_topics(self, run: str) -> None:
        """Create every topic of the registry for this run; existing ones are checked (partitions), not changed."""
        ...

    def existing_topics(self) -> frozenset[str]:
        """Names of all topics."""
        ...

    def close(self) -> None:
        """Safe to call twice."""
        ...


# ---------------------------------------------------------------- generation


class RewardFunction(Protocol):
    """Scores completions."""

    name: str
    """name@version"""

    def score(self, request: PromptRequest, completions: Sequence[Completion]) -> Sequence[Reward]:
        """One Reward per completion, in order. Never raises: a crash becomes Reward(value=None, error=...)."""
        ...


class RewardScorer(Protocol):
    """Scores whole groups without making its caller wait."""

    name: str
    """name@version"""

    def submit(self, request: PromptRequest, completions: Sequence[Completion]) -> Future[Sequence[Reward]]:
        """One Reward per completion, in order, within a stated limit. Neither this nor the future ever raises."""
        ...

    def close(self) -> None:
        """Stop at once; futures under way may never be done. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem of a prompt source."""

    index: int
    prompt_id: str
    task: str
    text: str | None
    token_ids: npt.NDArray[np.int32]
    reference: Mapping[str, str]


class PromptSource(Protocol):
    """A fixed, ordered set of prompts; cursor i of epoch e is a pure function of (seed, i)."""

    def __len__(self) -> int: ...

    def at(self, cursor: int) -> tuple[Prompt, int]:
        """The prompt at this cursor of the endless seeded shuffle, and its epoch."""
        ...

    def by_index(self, index: int) -> Prompt:
        """The prompt with that index (for a prompt that is issued again)."""
        ...


class SamplingDefaults(Protocol):
    """Where a request's sampling comes from."""

    def for_prompt(self, prompt: Prompt) -> Sampling: ...
