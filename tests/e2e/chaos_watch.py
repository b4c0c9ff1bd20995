"""Follows the log of a run while it goes, and says where the trainer stands. Reads only committed records.

An outage of the broker is no failure here: what was read stays, reading goes on when it is back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.kafka_clients import KafkaSettings
from infra.kafka_reader import KafkaEventReader
from infra.ports import Record
from schemas.errors import LogUnavailable
from schemas.headers import is_arrow
from schemas.heartbeat import Heartbeat, decode_heartbeat
from schemas.ids import RunId
from schemas.ledger import AnyLedgerControl, decode_ledger_control
from schemas.policy_events import AnyPolicyEvent, VersionPublished, decode_policy_event
from schemas.topics import TOPICS, TopicName, topic
from tests.e2e.chaos_plan import Phase

_TOPICS = (TopicName.POLICY, TopicName.LEDGER, TopicName.TRAJECTORIES, TopicName.WORKERS)
_STAGING = ".tmp-"
Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An event of `policy`, and when it was seen here."""

    event: AnyPolicyEvent
    seen_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRecord:
    """A record of `trajectories` that the broker had acknowledged: readers see no other."""

    group_id: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What log, store and the trainer's own log say about it at one instant."""

    has_begun: bool
    """this process went on from the committed state"""
    is_saving: bool
    has_unnamed_checkpoint: bool
    """one that it made itself, under its final name"""
    next_batch_is_in: bool

    @property
    def phase(self) -> Phase:
        """Where in its cycle it stands."""
        if not self.has_begun:
            return Phase.RECOVERING
        if self.has_unnamed_checkpoint:
            return Phase.BETWEEN
        if self.is_saving:
            return Phase.SAVING
        return Phase.COMPUTING if self.next_batch_is_in else Phase.AFTER_COMMIT


@dataclass(slots=True)
class LogView:
    """What was read so far. Pure: records in, facts out."""

    policy: list[Seen] = field(default_factory=list)
    newest: VersionPublished | None = None
    control: AnyLedgerControl | None = None
    records: dict[tuple[int, int], SeenRecord] = field(default_factory=dict)
    """(partition, offset) -> what lies there in `trajectories`"""
    groups: set[str] = field(default_factory=set)
    beats: dict[str, Heartbeat] = field(default_factory=dict)
    """the last of each worker"""
    claimed_at_us: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    """(worker, incarnation) -> group -> the first heartbeat that named it: written just before it was begun"""
    attempts: set[str] = field(default_factory=set)
    """checkpoints that committed versions name"""

    def apply(self, record: Record, seen_s: float) -> None:
        """Take one record."""
        name = record.topic.rpartition(".")[2]
        if name == TopicName.POLICY:
            event = decode_policy_event(record.value)
            self.policy.append(Seen(event=event, seen_s=seen_s))
            if isinstance(event, VersionPublished):
                self.newest = event
                self.attempts.add(event.manifest_uri.split("/")[1])
        elif name == TopicName.LEDGER:
            if not is_arrow(record.headers):
                self.control = decode_ledger_control(record.value)
        elif name == TopicName.TRAJECTORIES:
            group_id = (record.key or b"").decode()
            sha256 = hashlib.sha256(record.value or b"").hexdigest()
            self.records[record.partition, record.offset] = SeenRecord(group_id=group_id, sha256=sha256)
            self.groups.add(group_id)
        else:
            beat = decode_heartbeat(record.value)
            self.beats[beat.worker] = beat
            first = self.claimed_at_us.setdefault((beat.worker, beat.incarnation), {})
            for group_id in beat.claims:
                first.setdefault(group_id, beat.at_us)

    @property
    def version(self) -> int:
        """The newest committed version; -1 before the first."""
        return -1 if self.newest is None else self.newest.version

    def next_batch_is_in(self) -> bool:
        """The groups that the next step is made of all lie in the log."""
        if self.newest is None or self.control is None:
            return False
        depth = self.newest.depth
        wanted = [group.group_id for group in self.control.position.open_groups if group.intended_step <= depth]
        return bool(wanted) and all(group_id in self.groups for group_id in wanted)

    def claims(self, worker: str) -> dict[str, int]:
        """Groups that the last heartbeat of a worker names -> when it began them."""
        beat = self.beats.get(worker)
        if beat is None:
            return {}
        first = self.claimed_at_us[worker, beat.incarnation]
        return {group_id: first[group_id] for group_id in beat.claims}


class StoreView:
    """The attempts of one run in the store, told apart: named by a version, left behind, or new."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.left_behind: set[str] = set()
        """of processes that are gone, and of steps that were given up: no version will ever name them"""

    def names(self) -> set[str]:
        """Everything there, temporary names too."""
        return {path.name for path in self._directory.iterdir()} if self._directory.is_dir() else set()

    def changed_ns(self) -> int:
        """Changes with every entry that is made or renamed."""
        try:
            return self._directory.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def unnamed(self, attempts: set[str], after_us: int) -> set[str]:
        """Complete checkpoints that may still become a version: made after the newest version was."""
        names = {name for name in self.names() - attempts - self.left_behind if not name.startswith(".")}
        return {name for name in names if self._written_us(name) > after_us}

    def staging(self) -> set[str]:
        """Checkpoints that are being written."""
        return {name for name in self.names() - self.left_behind if name.startswith(_STAGING)}

    def give_up(self, attempts: set[str]) -> None:
        """The trainer is gone: whatever no version names now is left behind."""
        self.left_behind |= self.names() - attempts

    def _written_us(self, name: str) -> float:
        try:
            return (self._directory / name).stat().st_mtime_ns / 1e3
        except FileNotFoundError:  # retired meanwhile
            return 0.0


class LogWatch:
    """Keeps a LogView up to date."""

    def __init__(self, settings: KafkaSettings, run: RunId) -> None:
        self.view = LogView()
        self._run = run
        self._reader = KafkaEventReader(
            settings, {topic(run, name): TOPICS[name].partitions for name in _TOPICS}, "beginning"
        )

    def pump(self) -> int:
        """Take what has arrived; how many records."""
        try:
            records = self._reader.poll(2_000)
        except LogUnavailable:
            return 0
        seen_s = time.monotonic()
        for record in records:
            self.view.apply(record, seen_s)
        return len(records)

    def catch_up(self, limit_s: float = 10.0) -> None:
        """Take everything that is committed now. AssertionError after limit_s."""
        deadline_s = time.monotonic() + limit_s
        ends: Mapping[Place, int] | None = None
        while time.monotonic() < deadline_s:
            try:
                ends = self._reader.end_offsets() if ends is None else ends
            except LogUnavailable:
                continue
            self.pump()
            positions = self._reader.positions()
            if all(positions[place] >= end for place, end in ends.items()):
                return
            time.sleep(0.005)
        raise AssertionError(f"the log was not read to its end within {limit_s:g} s")

    def has_open_transaction(self) -> bool:
        """A transaction hides records of `policy` or `ledger` now."""
        stable, high = self._reader.end_offsets(), self._reader.high_watermarks()
        places = [(topic(self._run, name), 0) for name in (TopicName.POLICY, TopicName.LEDGER)]
        return any(high[place] > stable[place] for place in places)

    def acknowledged(self) -> dict[Place, int]:
        """Ends of all partitions read here, records of open transactions included."""
        return dict(self._reader.high_watermarks())

    def close(self) -> None:
        """Safe to call twice."""
        self._reader.close()
