"""What services do with records of another build: docs/operations.md, "What a build reads of another"."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from infra.policy_follower import PolicyFollower
from infra.ports import Message
from schemas.errors import IllegalState
from schemas.headers import control_headers
from schemas.ledger import Subject
from schemas.policy_events import encode_policy_event
from schemas.topics import TopicName
from schemas.trajectory_codec import encode_group, group_message_headers
from tests.cases.trainer_rig import TrainerRig
from tests.fakes.log_script import PolicyScript
from tests.fakes.memory_log import MemoryLog
from tests.fakes.virtual_clock import VirtualClock

POLICY = "demo.policy"


@pytest.mark.parametrize("change", [{"added": 1}, {"type": "VersionPraised"}], ids=["a-field", "an-event"])
def test_a_policy_event_that_this_build_does_not_know_is_stepped_over_and_said(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    log = MemoryLog(VirtualClock())
    log.client("setup").admin().create_topics("demo")
    script = PolicyScript()
    script.started()
    script.published(0)
    script.published(1)
    for place, known in enumerate(script.events):
        value = encode_policy_event(known)
        if place == 1:
            value = json.dumps(json.loads(value) | change).encode()
        log.append(Message(topic=POLICY, key=b"demo", value=value, headers=control_headers(known, value, "t")))
    follower = PolicyFollower(log.client("c").reader({POLICY: 1}, "beginning"), POLICY)
    with caplog.at_level(logging.INFO):
        follower.advance()

    assert (follower.undecodable, follower.read_up_to) == (1, 3)
    assert "policy_record_undecodable" in {record.message for record in caplog.records}
    assert 0 not in follower.fold.versions


def test_a_trainer_stops_at_a_ledger_that_a_newer_build_wrote(tmp_path: Path) -> None:
    rig = TrainerRig(tmp_path).begin()
    control = next(record for record in rig.records(TopicName.LEDGER) if record.value is not None)
    assert control.value is not None
    value = json.dumps(json.loads(control.value) | {"added": 1}).encode()
    rig.log.append(Message(topic="sim.ledger", key=b"sim", value=value, headers=control.headers))
    rig.log.crash("trainer")
    rig.trainer = rig.build()
    error = next(error for error in (rig.error() for _ in range(6)) if error is not None)

    assert isinstance(error, IllegalState)
    assert "cannot be read" in str(error)
    assert "added" in str(error)


def test_a_trainer_puts_rows_of_another_major_version_aside_and_goes_on(tmp_path: Path) -> None:
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=1).begin()
    rows = rig.rows(rig.requests()[0], [1, 0, 0, 1])
    value = encode_group(rows)
    headers = (*group_message_headers(rows, value, "g0"), ("arrow-schema", b"trajectory/2.0"))
    rig.send_bytes(value, headers, key=b"k")
    rig.answer(0)
    rig.step(12)

    assert [step.version_out for step in rig.steps()] == [1]
    assert [reason for _, _, reason in rig.told(Subject.RECORD)] == ["invalid:schema_version"]
    (letter,) = rig.records(TopicName.DEADLETTERS)
    assert letter.value == value
