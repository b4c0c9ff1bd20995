"""The worker heartbeat: last state per worker incarnation, JSON on the compacted topic `workers`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import InvalidRecord

WorkerState = Literal["joining", "loading", "ready", "serving", "draining", "doubtful", "leaving"]


class Heartbeat(BaseModel):
    """What a worker says of itself, at most every few seconds.

    >>> decode_heartbeat(b'{"run": "demo", "at_us": 1, "worker": "g0", "incarnation": "i1", "state": "serving",'
    ... b' "version": 3, "claims": ["demo/p000001/e0/a0"], "tokens_total": 10, "tokens_per_s": 5.0,'
    ... b' "idle_fraction": 0.5, "groups_total": 1, "sequence": 4}').version
    3
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    at_us: int
    worker: str
    incarnation: str
    sequence: int
    """0, 1, 2, ... within the incarnation"""
    state: WorkerState
    version: int | None
    """version of the weights it holds proven; None: none, or in doubt"""
    claims: tuple[str, ...]
    """group ids being worked on; written before generation starts"""
    tokens_total: int
    groups_total: int
    tokens_per_s: float
    idle_fraction: float


def decode_heartbeat(value: bytes | None) -> Heartbeat:
    """Read one heartbeat; InvalidRecord("heartbeat", ...) names the field that is wrong."""
    if value is None:
        raise InvalidRecord("empty_value", "a heartbeat has no value")
    try:
        return Heartbeat.model_validate_json(value)
    except ValidationError as error:
        raise InvalidRecord("heartbeat", str(error)) from error
