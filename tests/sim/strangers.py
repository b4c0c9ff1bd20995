"""Records that no service of ours would write: bytes nobody can decode, repeats, and altered copies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from infra.ports import Message, Record
from schemas.ids import ClaimId, GroupId, TrajectoryId
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import Trajectory
from schemas.trajectory_codec import TrajectoryLimits, decode_group, encode_group, group_message_headers
from tests.fakes.tiny_policy import VOCABULARY
from tests.sim.services import RUN

if TYPE_CHECKING:
    from tests.sim.faults import FaultyWorld
    from tests.sim.world import World

_GARBAGE = (b"", b"\x00", b"these are no bytes of ours", b"{}", b'{"type": "WorkerJoined"}', b"\xff\xff\xff\xff" * 8)
_POISONED = (
    TopicName.TRAJECTORIES, TopicName.TRAJECTORIES, TopicName.PROMPTS, TopicName.WORKERS, TopicName.POLICY,
    TopicName.DEADLETTERS,
)  # fmt: skip


def write_poison(world: World, rng: random.Random) -> None:
    """A few undecodable records into topics that services read."""
    for _ in range(3):
        name = rng.choice(_POISONED)
        headers = (("ce_type", b"\xff\xfe"), ("arrow-schema", b"trajectories/9.9")) if rng.random() < 0.5 else ()
        _append(world, name, b"poison", rng.choice(_GARBAGE), headers, rng.randrange(TOPICS[name].partitions))


def write_again(world: World, rng: random.Random) -> None:
    """Trajectory records once more, byte for byte: a sender that did not hear the first acknowledgement."""
    for record in _some_records(world, rng):
        _append(world, TopicName.TRAJECTORIES, record.key or b"", record.value, record.headers, record.partition)


def write_hostile(world: World, rng: random.Random) -> None:
    """Copies with another token under the same claim (conflict), rows of a group nobody asked for, broken rows."""
    for record in _some_records(world, rng):
        rows = [row.trajectory for row in decode_group(record.value, record.headers, _LIMITS) if row.trajectory]
        if not rows:
            continue
        altered = _altered(rows, rng.choice(("conflict", "closed", "other_claim", "vocabulary")))
        value = encode_group(altered)
        headers = group_message_headers(altered, value, "stranger")
        key = altered[0].group_id.encode()
        partition = record.partition if altered[0].group_id == rows[0].group_id else None
        _append(world, TopicName.TRAJECTORIES, key, value, headers, partition)


def write_half(world: World, message: Message, members: int) -> None:
    """The first part of a split group, whose worker died before it sent the others."""
    rows = [row.trajectory for row in decode_group(message.value, message.headers, _LIMITS) if row.trajectory]
    part = rows[: max(1, len(rows) - members)]
    value = encode_group(part)
    world.log.append(replace(message, value=value, headers=group_message_headers(part, value, "half")))


def compact(world: World, rng: random.Random) -> None:
    """The broker compacts the heartbeats."""
    world.log.compact(topic(RUN, TopicName.WORKERS))


_LIMITS = TrajectoryLimits(vocabulary_size=VOCABULARY)


def _altered(rows: list[Trajectory], how: str) -> list[Trajectory]:
    if how == "closed":
        group = GroupId(rows[0].group_id.rsplit("/", 1)[0] + "/a7")
        ids = [TrajectoryId(f"{group}/{row.index_in_group}") for row in rows]
        return [replace(r, group_id=group, attempt=7, trajectory_id=i) for r, i in zip(rows, ids, strict=True)]
    if how == "other_claim":
        row = rows[0]
        return [replace(row, claim_id=ClaimId(f"{row.worker_id}/{row.incarnation}/9{row.index_in_group}"))]
    if how == "vocabulary":
        return [replace(row, token_ids=np.full_like(row.token_ids, VOCABULARY + 7)) for row in rows]
    return [replace(row, token_ids=np.full_like(row.token_ids, 1 + int(row.token_ids[0]) % 40)) for row in rows]


def _some_records(world: World, rng: random.Random) -> list[Record]:
    name = topic(RUN, TopicName.TRAJECTORIES)
    records: list[Record] = []
    for partition in range(TOPICS[TopicName.TRAJECTORIES].partitions):
        records += world.log.read((name, partition), 0, 1_000)[0]
    records = [r for r in records if r.key != b"poison" and r.value]
    return rng.sample(records, min(3, len(records)))


def _append(
    world: World, name: TopicName, key: bytes, value: bytes | None, headers: tuple[tuple[str, bytes], ...],
    partition: int | None,
) -> None:  # fmt: skip
    world.log.append(Message(topic=topic(RUN, name), key=key, value=value, headers=headers, partition=partition))
    counted: FaultyWorld = world  # type: ignore[assignment]
    counted.strangers[name.value] += 1
