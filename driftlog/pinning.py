"""Pins and unpins versions: events that the retention rule obeys. Judged by the fold before they are written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from driftlog.run_reading import opened_run
from infra.clock import SystemClock
from infra.ports import Message
from infra.runner import ExitCode
from schemas.errors import UsageError
from schemas.headers import control_headers
from schemas.policy_events import AnyPolicyEvent, encode_policy_event
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName, topic

_LIMIT_S = 30.0


def write_pin(options: argparse.Namespace, event_of: Callable[[str, int], AnyPolicyEvent]) -> int:
    """Append the event made of (run, now in us) when it is legal now; UsageError says why it is not."""
    from infra.kafka_writer import KafkaEventWriter

    with opened_run(options) as at:
        fold = PolicyFold()
        for _ in at.log().policy(fold):
            pass
        event = event_of(at.run_id, SystemClock().now_us())
        void = fold.apply(fold.read_up_to, event)
        if void is not None:
            raise UsageError(f"version {options.version} of run {at.run_id}: {void.reason}")
        value = encode_policy_event(event)
        message = Message(
            topic=topic(at.run_id, TopicName.POLICY),
            key=at.run_id.encode(),
            value=value,
            headers=control_headers(event, value, "driftlog"),
        )
        writer = KafkaEventWriter(at.kafka)
        try:
            placed = writer.send(message).result(_LIMIT_S)
        finally:
            writer.close(_LIMIT_S)
    print(f"{event.type} of version {options.version} is policy@{placed.offset}", file=sys.stderr)
    return ExitCode.OK
