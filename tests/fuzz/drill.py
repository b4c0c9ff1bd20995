"""Feeds damaged messages to every decoder, and to the trainer's desk, and counts what goes wrong.

Only InvalidRecord may come out of a decoder; no row of a refused record may be held or counted as a member; a row
that is accepted must be one that a writer could have written; memory stays where it was.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from consumers.trainer.desk import Desk
from consumers.trainer.pacing import PacingRules
from consumers.trainer.replay import ReplayRules
from consumers.trainer.requests import RequestRules
from infra.ports import Record
from schemas.errors import CheckpointError, InvalidRecord
from schemas.ids import RunId
from schemas.ledger import OpenGroup, PartitionProgress, Position, Subject
from schemas.trajectory import Sampling
from schemas.trajectory_codec import decode_group, encode_group
from tests.fuzz.mutations import Headers, damaged_bytes, damaged_headers, damaged_json, damaged_table
from tests.unit.schemas.make_examples import GROUP, LIMITS, Example, examples

_TYPED = (InvalidRecord, CheckpointError)
"""CheckpointError: of a manifest, whose reader is the checkpoint store"""
_DESK_LIFE = 200
_HYPOTHESIS_SHARE = 0.1
_RULES = RequestRules(
    run=RunId("demo"), group_size=4, max_lag=1, max_attempts=2, sampling=Sampling(),
    pacing=PacingRules(groups_per_step=1, run_ahead=1, last_step=9),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the messages."""

    records: int = 0
    accepted: int = 0
    refused: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    untyped: list[str] = field(default_factory=list)
    """what came out of a decoder that is no typed error"""
    misused: list[str] = field(default_factory=list)
    """rows of refused records that were used, and accepted rows that nobody could have written"""
    slowest_ms: float = 0.0


class Drill:
    """One run of the fuzzer. Mutable."""

    def __init__(self, number: int) -> None:
        self._rng = random.Random(f"fuzz/{number}")
        self._number = number
        self._examples = examples()
        self._values = [example.value for example in self._examples if example.value]
        self._desk = _desk()
        self.tally = Tally()

    def run(self, records: int) -> Tally:
        """So many damaged messages: most by our own edits, a tenth out of hypothesis."""
        generated = int(records * _HYPOTHESIS_SHARE)
        for number in range(records - generated):
            example = self._examples[number % len(self._examples)]
            value, rows = self._damaged(example)
            headers = () if example.headers is None else damaged_headers(self._rng, example.headers, value, rows)
            self.feed(example, value, headers)
        self._generated(generated)
        return self.tally

    def feed(self, example: Example, value: bytes, headers: Headers) -> None:
        """One message to its decoder; trajectories also to the desk."""
        self.tally.records += 1
        started_s = time.process_time()
        try:
            decoded = example.decode(value, headers)
        except _TYPED as error:
            self.tally.refused += 1
            self.tally.codes[getattr(error, "code", type(error).__name__)] += 1
        except Exception as error:  # noqa: BLE001 - the very thing that is looked for
            words = f"{example.path}: {type(error).__name__}: {str(error)[:200]}"
            self.tally.untyped.append(words)
        else:
            self.tally.accepted += 1
            assert decoded is not None
        self.tally.slowest_ms = max(self.tally.slowest_ms, (time.process_time() - started_s) * 1000)
        if example.path.startswith("trajectories/"):
            self._to_the_desk(value, headers)

    # ------------------------------------------------------------------ edits

    def _damaged(self, example: Example) -> tuple[bytes, int | None]:
        if self._rng.random() < 0.5 or not example.value:
            return damaged_bytes(self._rng, example.value, self._values), None
        if example.path.endswith(".json"):
            return damaged_json(self._rng, example.value), None
        if example.path.endswith(".arrow"):
            return damaged_table(self._rng, example.value)
        return damaged_bytes(self._rng, example.value, self._values), None

    def _generated(self, count: int) -> None:
        """Documents and bytes that hypothesis makes up, in the place of every stored message."""
        plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
        document = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.text(max_size=6), inner, max_size=3), max_leaves=6)  # fmt: skip
        values = st.one_of(st.binary(max_size=64), document)
        header = st.tuples(
            st.sampled_from(("row-count", "payload-bytes", "arrow-schema", "ce_type")), st.binary(max_size=8)
        )

        @seed(self._number)
        @settings(
            max_examples=max(1, count), deadline=None, database=None, phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(example=st.sampled_from(self._examples), value=values, edits=st.lists(header, max_size=2))
        def drill(example: Example, value: Any, edits: list[tuple[str, bytes]]) -> None:
            if isinstance(value, dict) and example.path.endswith(".json") and example.value:
                value = json.loads(example.value) | value
            data = value if isinstance(value, bytes) else json.dumps(value).encode(errors="surrogatepass")
            self.feed(example, data, (*(example.headers or ()), *edits))

        if count:
            drill()

    # ------------------------------------------------------------------ use

    def _to_the_desk(self, value: bytes, headers: Headers) -> None:
        """As the trainer does: a record that decodes goes to the open set, any other is decided by its position."""
        if self.tally.records % _DESK_LIFE < len(self._examples):
            self._desk = _desk()
        desk, key = self._desk, (0, self.tally.records)
        try:
            rows = decode_group(value, headers, LIMITS)
        except InvalidRecord as error:
            record = Record(
                topic="demo.trajectories", partition=0, offset=key[1], key=None, value=value, headers=headers,
                timestamp_ms=0,
            )  # fmt: skip
            desk.take_poison(record, error, 0)
            decision = desk.decisions[-1]
            if decision.subject is not Subject.RECORD or self._held(key):
                self.tally.misused.append(f"a refused record is held or decided by rows: {error}")
            return
        except Exception:  # noqa: BLE001 - counted by feed
            return
        desk.take_rows(key, rows, 0)
        good = {row.row for row in rows if row.trajectory is not None}
        for buffer in desk.assembler.buffers():
            for claim in buffer.claims.values():
                members = [held for held in claim.members.values() if held.key == key]
                self.tally.misused += [
                    f"a refused row is a member: {m.row.code}" for m in members if m.row.row not in good
                ]
        for row in rows:
            self._could_have_been_written(row)

    def _held(self, key: tuple[int, int]) -> bool:
        return any(held.key == key for buffer in self._desk.assembler.buffers() for held in buffer.rows())

    def _could_have_been_written(self, row: Any) -> None:
        if row.trajectory is None:
            return
        try:
            encode_group([row.trajectory])
        except InvalidRecord as error:
            self.tally.misused.append(f"an accepted row could not have been written: {error}")


def _desk() -> Desk:
    """A desk that waits for the group of the stored message."""
    group = OpenGroup(group_id=GROUP, request_position=17, issued_at_us=0, attempt=1, intended_step=0)
    position = Position(
        open_groups=(group,), next_request=18, prompt_cursor=18, partitions={0: PartitionProgress(next_offset=0)}
    )
    return Desk(position, _RULES, ReplayRules())


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peaks of this process."""

    rss_mb: float
    arrow_mb: float

    @staticmethod
    def now() -> Memory:
        """Peak resident memory so far, and the most that Arrow held at once."""
        rss_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = pa.default_memory_pool().max_memory() or 0
        return Memory(rss_mb=rss_kb / 1024, arrow_mb=peak / 2**20)
