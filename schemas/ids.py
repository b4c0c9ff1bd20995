"""Identifiers: how they are spelled, and how to take them apart.

A group id names run, prompt, epoch and attempt, so that a log line alone tells what was asked:
`demo/p000017/e0/a1`. A trajectory id is a group id and an index: `demo/p000017/e0/a1/3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

RunId = NewType("RunId", str)
GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
ClaimId = NewType("ClaimId", str)
SwitchId = NewType("SwitchId", str)
AttemptId = NewType("AttemptId", str)
Version = NewType("Version", int)

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_GROUP_ID = re.compile(r"([a-z0-9][a-z0-9-]{0,62})/p(\d+)/e(\d+)/a(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """A group id taken apart."""

    run: RunId
    prompt: int
    """index of the prompt in the prompt source, from 0"""
    epoch: int
    """pass over the prompt source, from 0"""
    attempt: int
    """0 for the first request, +1 each time the same prompt is issued again"""


def run_id(text: str) -> RunId:
    """Check a run name: lower case letters, digits and '-', at most 63 (it becomes part of topic names)."""
    if not _RUN_ID.fullmatch(text):
        raise ValueError(
            f"run name {text!r}: use lower-case letters, digits and '-', at most 63, starting with a letter or digit"
        )
    return RunId(text)


def group_id(key: GroupKey) -> GroupId:
    """Spell a group id.

    >>> group_id(GroupKey(run=RunId("demo"), prompt=17, epoch=0, attempt=1))
    'demo/p000017/e0/a1'
    """
    return GroupId(f"{key.run}/p{key.prompt:06d}/e{key.epoch}/a{key.attempt}")


def parse_group_id(text: str) -> GroupKey:
    """Take a group id apart; ValueError names the text.

    >>> parse_group_id("demo/p000017/e0/a1").prompt
    17
    """
    match = _GROUP_ID.fullmatch(text)
    if match is None:
        raise ValueError(f"not a group id: {text!r} (expected run/p<prompt>/e<epoch>/a<attempt>)")
    run, prompt, epoch, attempt = match.groups()
    return GroupKey(run=RunId(run), prompt=int(prompt), epoch=int(epoch), attempt=int(attempt))


def trajectory_id(group: GroupId, index_in_group: int) -> TrajectoryId:
    """Spell a trajectory id: the group id and the index inside the group."""
    return TrajectoryId(f"{group}/{index_in_group}")


def parse_trajectory_id(text: str) -> tuple[GroupId, int]:
    """Take a trajectory id apart; ValueError names the text."""
    group, _, index = text.rpartition("/")
    parse_group_id(group)
    if not index.isdecimal():
        raise ValueError(f"not a trajectory id: {text!r} (expected <group id>/<index>)")
    return GroupId(group), int(index)


def claim_id(worker: WorkerId, incarnation: Incarnation, request_position: int) -> ClaimId:
    """One worker incarnation's work on one request."""
    return ClaimId(f"{worker}/{incarnation}/{request_position}")
