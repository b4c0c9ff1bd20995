"""Changes one thing in a TinyRun's log, as damage or as a careful forger would: with headers that fit the bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from consumers.offline.audit import AuditReport, Severity
from infra.ports import Record
from schemas import policy_events as ev
from schemas.errors import InvalidRecord
from schemas.headers import control_headers, is_arrow
from schemas.ledger import (
    AnyLedgerControl,
    Decision,
    DecisionRow,
    LedgerControl,
    StepCompleted,
    Subject,
    decode_ledger_control,
    encode_ledger_control,
)
from schemas.ledger_codec import DECISIONS, decode_decisions, encode_decisions
from schemas.policy_events import AnyPolicyEvent, decode_policy_event, encode_policy_event
from schemas.topics import TopicName
from schemas.trajectory_codec import decode_group, encode_group, group_message_headers
from schemas.trajectory_validate import WRITER_LIMITS
from tests.fakes.tiny_run import TinyRun


class Forge:
    """Tools on one run."""

    def __init__(self, run: TinyRun) -> None:
        self.run = run
        self.log = run.log

    def records(self, name: TopicName) -> list[Record]:
        """Every record of a topic."""
        return self.run.records(name)

    def rewrite(self, record: Record, **changes: Any) -> None:
        """Put other bytes or headers where a record lies."""
        entry = self.log.partition(record.topic, record.partition).entries[record.offset]
        entry.record = dataclasses.replace(record, **changes)

    def say_schema(self, record: Record, schema: bytes) -> None:
        """Let the record claim this schema version; its bytes stay what they are."""
        self.rewrite(record, headers=tuple((n, schema if n == "arrow-schema" else v) for n, v in record.headers))

    def newer(self, name: TopicName, schema: bytes) -> Record:
        """The topic's first record of rows claims this schema version, one of a later build."""
        record = next(r for r in self.records(name) if is_arrow(r.headers))
        self.say_schema(record, schema)
        return record

    def remove(self, record: Record) -> None:
        """Take a record out of the log."""
        self.log.partition(record.topic, record.partition).entries[record.offset].record = None

    def flip_byte(self, record: Record, at: int) -> None:
        """Change one byte of a value."""
        assert record.value is not None
        value = bytearray(record.value)
        value[at] ^= 1
        self.rewrite(record, value=bytes(value))

    def edit_decisions(self, version: int, edit: Callable[[list[DecisionRow]], list[DecisionRow]]) -> None:
        """Write other decisions into the step that made `version`, with headers that fit them (a careful forger)."""
        previous: Record | None = None
        for record in self.records(TopicName.LEDGER):
            if is_arrow(record.headers):
                previous = record
                continue
            control = decode_ledger_control(record.value)
            if isinstance(control, StepCompleted) and control.version_out == version:
                assert previous is not None
                rows = edit(list(decode_decisions(previous.value, previous.headers)))
                value = encode_decisions(rows)
                self.rewrite(previous, value=value, headers=_decision_headers(rows, value))
                return
            previous = None
        raise AssertionError(f"no step made version {version}")

    def edit_decision(self, trajectory_id: str, **changes: Any) -> None:
        """Change one decision about a trajectory in the step that trained it."""
        for version, decision in self.trained():
            if decision.trajectory_id == trajectory_id:
                self.edit_decisions(
                    version,
                    lambda rows: [
                        dataclasses.replace(r, **changes) if r.trajectory_id == trajectory_id else r for r in rows
                    ],
                )
                return
        raise AssertionError(f"{trajectory_id} was not trained")

    def edit_control(self, kind: type[LedgerControl], number: int, **changes: Any) -> None:
        """Change fields of the number-th control record of a kind."""
        found = [r for r in self.records(TopicName.LEDGER) if not is_arrow(r.headers)]
        records = [(r, c) for r in found if isinstance(c := decode_ledger_control(r.value), kind)]
        record, control = records[number]
        self._write_control(record, control.model_copy(update=changes))

    def replace_control(self, kind: type[LedgerControl], number: int, control: AnyLedgerControl) -> None:
        """Write another control record in the place of the number-th of a kind."""
        found = [r for r in self.records(TopicName.LEDGER) if not is_arrow(r.headers)]
        self._write_control([r for r in found if isinstance(decode_ledger_control(r.value), kind)][number], control)

    def _write_control(self, record: Record, control: AnyLedgerControl) -> None:
        value = encode_ledger_control(control)
        self.rewrite(record, value=value, headers=control_headers(control, value, "trainer"))

    def edit_event(self, kind: type[ev.PolicyEvent], number: int, **changes: Any) -> AnyPolicyEvent:
        """Change fields of the number-th policy event of a kind; the event as it was."""
        record = self.policy_records(kind)[number]
        event = decode_policy_event(record.value)
        changed = event.model_copy(update=changes)
        value = encode_policy_event(changed)
        self.rewrite(record, value=value, headers=control_headers(changed, value, "forger"))
        return event

    def policy_records(self, kind: type[ev.PolicyEvent]) -> list[Record]:
        """Records that hold events of a kind."""
        return [r for r in self.records(TopicName.POLICY) if isinstance(decode_policy_event(r.value), kind)]

    def edit_trajectory(self, trajectory_id: str, **changes: Any) -> None:
        """Write another row where a trajectory lies."""
        for record in self.records(TopicName.TRAJECTORIES):
            try:
                rows = [row.trajectory for row in decode_group(record.value, record.headers, WRITER_LIMITS)]
            except InvalidRecord:
                continue
            good = [row for row in rows if row is not None]
            if any(row.trajectory_id == trajectory_id for row in good):
                edited = [dataclasses.replace(r, **changes) if r.trajectory_id == trajectory_id else r for r in good]
                value = encode_group(edited)
                self.rewrite(record, value=value, headers=group_message_headers(edited, value, "forger"))
                return
        raise AssertionError(f"{trajectory_id} is not in the log")

    def trained(self) -> list[tuple[int, DecisionRow]]:
        """(version, decision) of every trained row, in order."""
        return [
            (t.control.version_out, row)
            for t in self.run.run_log().transactions()
            if isinstance(t.control, StepCompleted)
            for row in t.decisions
            if row.decision is Decision.TRAINED and row.subject is Subject.TRAJECTORY
        ]


def _decision_headers(rows: list[DecisionRow], value: bytes) -> Any:
    event_id = hashlib.sha256(value).hexdigest()[:32]
    return DECISIONS.headers(rows=len(rows), value=value, source="forger", at_us=0, event_id=event_id)


def remove_step(forge: Forge, version: int) -> None:
    """Take the ledger's records of one step out of the log."""
    for record in forge.records(TopicName.LEDGER):
        if record.key == str(version).encode():
            forge.remove(record)


def errors_of(report: AuditReport) -> dict[str, str]:
    """check -> subjects and messages of its errors."""
    found: dict[str, str] = {}
    for finding in report.findings:
        if finding.severity is Severity.ERROR:
            found[finding.check] = f"{found.get(finding.check, '')}{finding.subject}: {finding.message}\n"
    return found


def notices_of(report: AuditReport) -> set[str]:
    """Checks with a notice."""
    return {finding.check for finding in report.findings if finding.severity is Severity.NOTICE}
