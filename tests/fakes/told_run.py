"""A run told event by event and step by step, for what a TinyRun does not hold: failed switches, branches, length.

Entries go to the readings as a RunLog would give them; nothing is encoded. `told` is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

from consumers.offline.branches import branch_starts
from consumers.offline.outcomes import Ends
from consumers.offline.report.ledger_reading import METRICS, LedgerReading
from consumers.offline.report.policy_reading import PolicyReading
from consumers.offline.report.reading import RunReading
from consumers.offline.report.row_reading import RowReading
from consumers.offline.run_log import LedgerTransaction, PolicyEntry
from schemas import policy_events as ev
from schemas.ledger import Decision, DecisionRow, Position, StepCompleted, Subject
from schemas.policy_fold import PolicyFold
from tests.fakes.log_script import RUN, sha

SECOND_US = 1_000_000


class Teller:
    """Folds policy events and feeds them to a reading; every event is one second after the one before."""

    def __init__(self, *, second_us: int = SECOND_US) -> None:
        self.fold = PolicyFold()
        self.reading = PolicyReading()
        self.now_us = 0
        self._second_us = second_us

    def tell(self, event_type: type[ev.PolicyEvent], **values: object) -> int:
        """One event; its offset."""
        self.now_us += self._second_us
        event = event_type(run=RUN, at_us=self.now_us, **values)  # type: ignore[arg-type]
        offset = self.fold.read_up_to
        void = self.fold.apply(offset, event)  # type: ignore[arg-type]
        self.reading.add(PolicyEntry(offset=offset, event=event, void=void))  # type: ignore[arg-type]
        return offset

    def begin(self, *workers: str) -> None:
        """RunStarted, and workers that join."""
        self.tell(ev.RunStarted, segment=0, config_digest="c", code_revision="r")
        for worker in workers:
            self.tell(ev.WorkerJoined, worker=worker, incarnation="i", engine="hf", dtype="float32")

    def publish(self, version: int, *, parent: int | None, depth: int) -> None:
        """VersionPublished."""
        self.tell(
            ev.VersionPublished, version=version, parent=parent, depth=depth, manifest_uri=f"demo/a{version}/m",
            manifest_sha256=sha(version), bytes=1_000_000, optimizer_step=version, oldest_open_request=0,
        )  # fmt: skip

    def start(self, version: int, *workers: str, switch: str = "") -> str:
        """SwitchStarted; its id."""
        name = switch or f"s{version}"
        required = tuple(ev.WorkerRef(worker=worker, incarnation="i") for worker in workers)
        self.tell(
            ev.SwitchStarted, switch=name, version=version, mode="barrier", read_up_to=self.fold.read_up_to,
            required=required, deadline_s=30.0,
        )  # fmt: skip
        return name

    def loaded(self, version: int, worker: str, switch: str) -> int:
        """VersionLoaded; its offset."""
        return self.tell(
            ev.VersionLoaded, switch=switch, worker=worker, incarnation="i", version=version,
            manifest_sha256=sha(version), probe_diff_new=0.0, probe_diff_old=0.5, probe_tolerance=1e-4,
            phase_s={"fetching": 0.5, "draining": 0.125, "loading": 0.25},
        )  # fmt: skip

    def live(self, version: int, *workers: str) -> None:
        """A switch that succeeds."""
        switch = self.start(version, *workers)
        acks = tuple(self.loaded(version, worker, switch) for worker in workers)
        self.tell(ev.VersionActivated, switch=switch, version=version, acks=acks)


def troubled() -> Teller:
    """Versions 0-3, a failed switch to 2, a lost worker, and a branch from 1 that is the newest: 4, 5."""
    teller = Teller()
    teller.begin("g0", "g1")
    teller.publish(0, parent=None, depth=0)
    teller.live(0, "g0", "g1")
    teller.publish(1, parent=0, depth=1)
    teller.live(1, "g0", "g1")
    teller.publish(2, parent=1, depth=2)
    switch = teller.start(2, "g0", "g1")
    for worker in ("g0", "g1"):
        teller.tell(
            ev.LoadFailed, switch=switch, worker=worker, incarnation="i", version=2, reason="sha256 <b>mismatch</b>",
            weights_touched=False,
        )  # fmt: skip
    teller.tell(ev.VersionFailed, switch=switch, version=2, reason="no worker left")
    for worker in ("g0", "g1"):
        ack = teller.tell(
            ev.VersionLoaded, switch=None, worker=worker, incarnation="i", version=1, manifest_sha256=sha(1),
            probe_diff_new=0.0, probe_diff_old=0.5, probe_tolerance=1e-4, phase_s={},
        )  # fmt: skip
        teller.tell(ev.WorkerAdmitted, worker=worker, incarnation="i", version=1, ack=ack)
    teller.publish(3, parent=2, depth=3)
    teller.tell(
        ev.WorkerExpired, worker="g1", incarnation="i", reason="lease", last_heartbeat_at_us=None,
        last_heartbeat_offset=None,
    )  # fmt: skip
    teller.live(3, "g0")
    teller.tell(ev.BranchStarted, from_version=1)
    teller.publish(4, parent=1, depth=1)
    teller.live(4, "g0")
    teller.publish(5, parent=4, depth=2)
    teller.tell(ev.VersionRetired, version=0, rule="keep=4")
    return teller


def step(version: int, rows: Sequence[DecisionRow] = (), *, at_us: int = 0, **metrics: float) -> LedgerTransaction:
    """A training step that made this version; metric names with __ for /."""
    control = StepCompleted(
        run=RUN, at_us=at_us, position=Position(open_groups=(), next_request=0, prompt_cursor=0, partitions={}),
        policy_read_up_to=0, version_in=version - 1, version_out=version, groups=1, trajectories=max(1, len(rows)),
        batch_digest="b", metrics={name.replace("__", "/"): value for name, value in metrics.items()},
        phase_s={"train": 1.0, "whole": 2.0}, rng_digest="g", config_digest="c", code_revision="r",
    )  # fmt: skip
    return LedgerTransaction(number=version, offset=2 * version, decisions=tuple(rows), control=control)


def decided(
    decision: Decision, reason: str = "", *, tokens: int = 4, reward: float = 1.0, offset: int = 0
) -> DecisionRow:
    """The decision on one trajectory."""
    used = decision is not Decision.DROPPED
    return DecisionRow(
        subject=Subject.TRAJECTORY, group_id="demo/p000000/e0/a0", trajectory_id="demo/p000000/e0/a0/0", partition=0,
        offset=offset, row=0, row_sha256="h", decision=decision, reason=reason, policy_lag=1 if used else None,
        weight=float(used), use_count=int(used), reward=reward, advantage=0.0 if used else None,
        completion_tokens=tokens, consumed_at_us=0,
    )  # fmt: skip


def long_run(versions: int) -> RunReading:
    """Every metric in every step, two workers, every version live."""
    teller = Teller(second_us=100_000)
    teller.begin("g0", "g1")
    ledger = LedgerReading()
    for version in range(versions + 1):
        teller.publish(version, parent=version - 1 if version else None, depth=version)
        teller.live(version, "g0", "g1")
        if version:
            metrics = dict.fromkeys(METRICS, version * 37 % 101 / 101)
            ledger.add(step(version, [decided(Decision.TRAINED)], at_us=teller.now_us, **metrics))
    return reading_of(teller, ledger)


def reading_of(teller: Teller, ledger: LedgerReading) -> RunReading:
    """What read_run would give, without trajectories."""
    rows = RowReading(uses=ledger.uses, ends=Ends(None, ledger.control), started_us=0, newest_step=None)
    fold = teller.fold
    for version in ledger.versions:
        rows.met[version, 1] = 4
    return RunReading(
        run=RUN, policy=teller.reading, ledger=ledger, rows=rows, newest=fold.newest, live=fold.live, newest_event=None,
        statuses={number: state.status for number, state in fold.versions.items()}, branches=branch_starts(fold),
        idle={}, evaluations={}, prompts={},
    )  # fmt: skip
