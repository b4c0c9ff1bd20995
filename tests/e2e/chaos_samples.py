"""Hits, events and a whole run as the tests of `make chaos` need them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from infra.ports import Record
from schemas.policy_events import (
    PolicyEvent,
    VersionPublished,
    WorkerJoined,
    encode_policy_event,
)
from tests.e2e.chaos_evidence import Evidence, Generated, GroupFate
from tests.e2e.chaos_hits import Hit, Traces
from tests.e2e.chaos_plan import (
    TRAINER,
    Fault,
    Phase,
    RunPlan,
    What,
)
from tests.e2e.chaos_watch import LogView, SeenRecord

G0, TRAINER_KILL = "generator-0", Fault(what=What.KILL, service=TRAINER, phase=Phase.BETWEEN)
GENERATOR_KILL = Fault(what=What.KILL, service=G0)
PLAN = RunPlan(name="storm", versions=2, faults=(TRAINER_KILL, GENERATOR_KILL))


def published(version: int, at_us: int) -> VersionPublished:
    return VersionPublished(
        run="tiny", at_us=at_us, version=version, parent=None if version == 0 else version - 1, depth=version,
        manifest_uri=f"tiny/a{version}/manifest.json", manifest_sha256="ab", bytes=1, optimizer_step=version,
        oldest_open_request=0,
    )  # fmt: skip


def joined(incarnation: str, at_us: int = 1) -> WorkerJoined:
    return WorkerJoined(run="tiny", at_us=at_us, worker="g0", incarnation=incarnation, engine="hf", dtype="float32")


def record(name: str, value: bytes, key: bytes = b"tiny", offset: int = 0) -> Record:
    return Record(
        topic=f"tiny.{name}", partition=0, offset=offset, key=key, value=value, headers=(), timestamp_ms=0
    )  # fmt: skip


def view_of(*events: tuple[PolicyEvent, float]) -> LogView:
    view = LogView()
    for event, seen_s in events:
        view.apply(record("policy", encode_policy_event(event)), seen_s)
    return view


def hit_of(fault: Fault, **changes: Any) -> Hit:
    fields: dict[str, Any] = {
        "fault": fault, "at_s": 10.0, "at_us": 10_000_000, "phase": fault.phase or Phase.COMPUTING, "version": 1,
        "evidence": "gone", "recovered_s": 16.0, **changes,
    }  # fmt: skip
    return Hit(**fields)


def claim(start_s: float, end_s: float, *, worker: str = "g0", incarnation: str = "i1", offset: int = 0) -> Generated:
    return Generated(
        worker=worker,
        incarnation=incarnation,
        started_us=int(start_s * 1e6),
        finished_us=int(end_s * 1e6),
        key=(0, offset),
    )


def fate(decision: str = "trained", reason: str = "", decided_s: float = 20.0) -> GroupFate:
    return GroupFate(decision=decision, reason=reason, decided_us=int(decided_s * 1e6))


WHOLE_TRACES = Traces(
    deaths=Counter({(TRAINER, -9): 1, (G0, -9): 1}),
    restarts=Counter({TRAINER: 1, G0: 1}),
    broker_starts=1,
    resumed=1,
    in_doubt=0,
    store_full=0,
)
WHOLE = Evidence(
    summary={
        "versions_trained": 2, "undecided": 0, "audit_findings": 0, "groups_trained": 1, "trajectories_trained": 4,
        "dropped": {}, "trajectories_in_log": 4,
    },
    traces=WHOLE_TRACES,
    joins=Counter({"g0": 2, "g1": 1}),
    fates={"tiny/a": (fate(),)},
    row_decisions={(0, 0, row): 1 for row in range(4)},
    generated={"tiny/a": (claim(5, 8),)},
    records={(0, 0): "sha"},
    attempts=frozenset({"a0", "a1"}),
    weights_sha256="w",
)  # fmt: skip
WHOLE_HITS = (hit_of(TRAINER_KILL, attempts=frozenset({"orphan"})), hit_of(GENERATOR_KILL))
SEEN = {(0, 0): SeenRecord(group_id="tiny/a", sha256="sha")}
