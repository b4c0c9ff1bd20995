"""Bugs planted between the services and the log: what is read too early, written by the wrong one, or done blind.

A function here takes a MonkeyPatch; it is called anew for every seed, and undone before the log is judged.
"""

from __future__ import annotations

from typing import Any

import pytest

from consumers.trainer import service, transactor
from producers import claims, generator
from tests.fakes.memory_log import MemoryLog
from tests.fakes.memory_ports import MemoryGroupReader
from tests.fakes.tiny_policy import TinyEngine

Patch = pytest.MonkeyPatch


def uncommitted_records_are_read(patch: Patch) -> None:
    """Consumers with the isolation that a client has by default: open and aborted transactions count."""

    def everything(self: MemoryLog, place: Any, position: int, max_records: int) -> tuple[list[Any], int]:
        entries, records = self.partition(*place).entries, []
        while position < len(entries) and len(records) < max_records:
            if entries[position].record is not None:
                records.append(entries[position].record)
            position += 1
        return records, position

    patch.setattr(MemoryLog, "read", everything)
    patch.setattr(MemoryLog, "stable_end", lambda self, place: self.partition(*place).end)


def the_state_is_read_before_the_predecessor_is_fenced(patch: Patch) -> None:
    """init_transactions comes with the first commit: what a living predecessor writes until then is not known."""
    recover, commit = service.TrainerService._recover, transactor.Transactor._commit

    def unfenced(self: Any) -> bool:
        writer = self._p.writer
        init, writer.init = writer.init, lambda: None
        self._transactor.init_late = init if self._reading is None else self._transactor.init_late
        try:
            return bool(recover(self))
        finally:
            writer.init = init

    def then_init(self: Any, handed_over: Any) -> int:
        late, self.init_late = self.init_late, None
        if late is not None:
            late()
        return commit(self, handed_over)

    patch.setattr(service.TrainerService, "_recover", unfenced)
    patch.setattr(transactor.Transactor, "_commit", then_init)


def offsets_of_a_revoked_partition_are_committed(patch: Patch) -> None:
    """Positions outlive their partitions, and a broker takes a commit for a partition of somebody else."""
    sync = MemoryGroupReader._sync

    def taking(self: MemoryGroupReader) -> None:
        if self._client.reaches():
            for partition, value in self._queued.items():
                self._group.offsets[self._topic, partition] = value
            self._queued = {}
        sync(self)

    commits = claims.Claims.commits

    def old_ones_too(self: claims.Claims) -> Any:
        kept = self.__dict__.setdefault("kept", {})
        kept |= {p: c for p, c in self._partitions.items() if c._low is not None}
        found = {p: (c._low, "") for p, c in kept.items() if p not in self._partitions}
        return found | commits(self)

    patch.setattr(MemoryGroupReader, "_sync", taking)
    patch.setattr(claims.Claims, "commits", old_ones_too)


def kept_groups_get_no_new_segment(patch: Patch) -> None:
    """in_flight = keep, and a group that is loaded over is stamped with the one version it ends under."""
    completion = TinyEngine._completion

    def one_stamp(self: TinyEngine, running: Any, index: int) -> Any:
        found = completion(self, running, index)
        whole = sum(segment.length for segment in found.segments)
        last = type(found.segments[-1])(version=self._version, length=whole, proof=self._proof)
        object.__setattr__(found, "segments", (last,))
        return found

    patch.setattr(TinyEngine, "_completion", one_stamp)


def a_worker_that_reads_nothing_goes_on_admitting(patch: Patch) -> None:
    """It may have lost its standing long ago, and takes requests all the same."""
    patch.setattr(generator.GeneratorService, "_is_fresh", lambda self: True)
