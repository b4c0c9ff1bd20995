"""A worker's heartbeat: counters, idle fraction, and when the next one is due."""

from __future__ import annotations

from infra.ports import Clock, Message
from schemas.headers import json_headers
from schemas.heartbeat import Heartbeat, WorkerState
from schemas.ids import RunId
from schemas.topics import TopicName, topic


class Pulse:
    """Counts what the worker does between heartbeats."""

    def __init__(self, run: RunId, worker: str, clock: Clock, every_s: float) -> None:
        self._run = run
        self._worker = worker
        self._clock = clock
        self._every_s = every_s
        self._sequence = 0
        self._tokens_total = 0
        self._groups_total = 0
        self._tokens_window = 0
        now_s = clock.monotonic_s()
        self._window_started_s = now_s
        self._due_s = now_s
        self._mark_s = now_s
        self._idle_s = 0.0
        self._tokens_per_s = 0.0
        self._idle_fraction = 1.0

    def count_tokens(self, tokens: int) -> None:
        """Tokens of a finished completion."""
        self._tokens_total += tokens
        self._tokens_window += tokens

    def count_group(self) -> None:
        """A group is finished."""
        self._groups_total += 1

    def idle(self) -> None:
        """Nothing was generated since the last mark."""
        now_s = self._clock.monotonic_s()
        self._idle_s += now_s - self._mark_s
        self._mark_s = now_s

    def busy(self) -> None:
        """The engine worked since the last mark."""
        self._mark_s = self._clock.monotonic_s()

    def is_due(self) -> bool:
        """The next heartbeat should go out."""
        return self._clock.monotonic_s() >= self._due_s

    def message(self, incarnation: str, state: WorkerState, version: int | None, claims: tuple[str, ...]) -> Message:
        """The heartbeat to send now."""
        now_s = self._clock.monotonic_s()
        window_s = now_s - self._window_started_s
        if window_s >= self._every_s:
            self._tokens_per_s = self._tokens_window / window_s
            self._idle_fraction = min(1.0, self._idle_s / window_s)
            self._window_started_s, self._tokens_window, self._idle_s = now_s, 0, 0.0
        beat = Heartbeat(
            run=self._run,
            at_us=self._clock.now_us(),
            worker=self._worker,
            incarnation=incarnation,
            sequence=self._sequence,
            state=state,
            version=version,
            claims=claims,
            tokens_total=self._tokens_total,
            groups_total=self._groups_total,
            tokens_per_s=self._tokens_per_s,
            idle_fraction=self._idle_fraction,
        )
        self._sequence += 1
        self._due_s = now_s + self._every_s
        value = beat.model_dump_json().encode()
        headers = json_headers(
            event_type="Heartbeat", source=f"generator/{self._worker}", value=value, at_us=beat.at_us
        )
        key = f"{self._worker}/{incarnation}".encode()
        return Message(topic=topic(self._run, TopicName.WORKERS), key=key, value=value, headers=headers)
