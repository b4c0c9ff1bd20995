"""`status`: where a run stands now, for a person and as JSON. Reads the log only; the run may be under way.

Of the trajectories it reads what the trainer has not decided yet, nothing else.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from consumers.offline.branches import BranchStart, branch_starts
from consumers.offline.evaluations import EvaluatedRun, evaluated_run
from consumers.offline.never_trained import NeverTrained, NeverTrainedPrompts
from consumers.offline.run_log import RunLog
from consumers.offline.switch_latency import SwitchLatencies, latency_lines
from infra.config_trainer import AlarmsSection
from infra.metrics_alarms import alarms
from schemas import policy_events as ev
from schemas.headers import rfc3339
from schemas.heartbeat import Heartbeat
from schemas.ledger import AnyLedgerControl, Decision, LedgerEnded, OpenGroup, StepCompleted, Subject
from schemas.policy_fold import PolicyFold

LAST_STEPS = 10
_SHOWN_GROUPS = 5
_SHOWN_PROMPTS = 3
_SHOWN_BRANCHES = 3
# What a person looks at first when training goes wrong; each is looked for under these names, in this order.
_HEALTH: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("critic/rewards/mean", "critic/score/mean")),
    ("ess", ("mismatch/applied_ess", "actor/ratio_ess")),
    ("entropy", ("actor/entropy",)),
    ("clip_fraction", ("actor/pg_clipfrac",)),
    ("kl", ("actor/ppo_kl",)),
    ("grad_norm", ("actor/grad_norm",)),
    ("trainer_idle", ("trainer/idle_fraction",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker: what the fold grants it, and what it says of itself."""

    worker: str
    incarnation: str
    standing: str
    state: str
    """of its last heartbeat; "silent" when there is none"""
    version: int | None
    heartbeat_age_s: float | None
    claims: tuple[str, ...]
    tokens_per_s: float
    idle_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where the run stands at the end of the log as it was read."""

    run: str
    state: str
    """not started, running, ended"""
    at: str
    newest_version: int | None
    live_version: int | None
    newest_step: int | None
    """training steps that led to the newest version; less than its number where the run has branches"""
    branches: tuple[BranchStart, ...]
    open_switch: str
    """words; empty when none is open"""
    last_failure: str
    switch_latency_s: dict[str, dict[str, float]]
    """phase -> p50, p95 and count over the last switches"""
    steps: int
    """training steps of all branches"""
    workers: tuple[WorkerStatus, ...]
    open_groups: int
    oldest_open_s: float | None
    """age of the oldest open request"""
    trajectories_waiting: int
    """rows in the log that the trainer has not decided"""
    lag_histogram: dict[str, int]
    """policy lag -> trajectories, last steps"""
    dropped: dict[str, int]
    """reason -> trajectories, whole run"""
    dropped_groups: dict[str, int]
    never_trained: int
    """prompts that were dropped and not asked for again"""
    never_trained_first: tuple[NeverTrained, ...]
    """a few of them; `driftlog trace --never-trained` lists all"""
    tokens_per_s: float
    """sum of the workers' last heartbeats"""
    steps_per_minute: float | None
    """over the last steps"""
    trajectories_per_s: float | None
    health: dict[str, float]
    """of the last step"""
    evaluation: EvaluatedRun
    """held-out prompts, where an evaluator ran"""
    alarms: tuple[str, ...]
    """what is worth a look in the latest steps, in words"""
    waiting_for: tuple[str, ...]
    """what the trainer waits for, in words"""

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2)

    def text(self) -> str:
        """For a person."""
        step = f" (step {self.newest_step})" if self.branches else ""
        versions = f"newest version {_or_none(self.newest_version)}{step}, live {_or_none(self.live_version)}"
        lines = [f"run {self.run}: {self.state}, {self.steps} steps; {versions}"]
        lines += [f"branch: {start.words}" for start in self.branches[-_SHOWN_BRANCHES:]]
        if self.open_switch:
            lines.append(f"switch: {self.open_switch}")
        if self.last_failure:
            lines.append(f"last failed switch: {self.last_failure}")
        lines += latency_lines(self.switch_latency_s)
        lines += [_worker_line(worker) for worker in self.workers]
        oldest = "" if self.oldest_open_s is None else f", the oldest for {self.oldest_open_s:.1f} s"
        lines.append(f"open groups: {self.open_groups}{oldest}; {self.trajectories_waiting} trajectories wait")
        lines.append(f"policy lag of the last {LAST_STEPS} steps: {_counts(self.lag_histogram)}")
        lines.append(f"dropped: {_counts(self.dropped)}; groups: {_counts(self.dropped_groups)}")
        if self.never_trained:
            shown = [f"  {given_up.words}" for given_up in self.never_trained_first]
            lines += [f"never trained: {self.never_trained} prompts (`driftlog trace --never-trained`), first:", *shown]
        rate = "" if self.steps_per_minute is None else f", {self.steps_per_minute:.1f} steps/min"
        rate += "" if self.trajectories_per_s is None else f", {self.trajectories_per_s:.1f} trajectories/s trained"
        lines.append(f"throughput: {self.tokens_per_s:.0f} tokens/s{rate}")
        if self.health:
            lines.append("last step: " + ", ".join(f"{name} {value:.4g}" for name, value in self.health.items()))
        lines += [f"evaluation: {words}" for words in self.evaluation.words]
        lines += [f"alarm: {words}" for words in self.alarms]
        lines += [f"the trainer waits for {what}" for what in self.waiting_for]
        return "\n".join(lines)


@dataclass(slots=True)
class _Ledger:
    control: AnyLedgerControl | None
    steps: int
    last: deque[StepCompleted]
    recent: deque[Mapping[str, float]]
    """metrics of the steps that alarms look at"""
    dropped: Counter[str]
    dropped_groups: Counter[str]
    given_up: NeverTrainedPrompts


def status(run_log: RunLog, *, now_us: int, limits: AlarmsSection | None = None) -> RunStatus:
    """Read the run and say where it stands. `now_us` gives heartbeats and requests their age."""
    fold = PolicyFold()
    any_event = False
    switches = SwitchLatencies()
    for entry in run_log.policy(fold):
        any_event = True
        switches.add(entry)
    limits = limits or AlarmsSection()
    ledger = _read_ledger(run_log, limits.window_steps)
    beats = {(beat.worker, beat.incarnation): beat for beat in run_log.heartbeats()}
    workers = tuple(_worker(name, fold, beats, now_us) for name in sorted(fold.workers))
    open_groups = () if ledger.control is None else ledger.control.position.open_groups
    waiting = _undecided_rows(run_log, ledger.control)
    ended = isinstance(ledger.control, LedgerEnded)
    step = ledger.last[-1] if ledger.last else None
    given_up = ledger.given_up.found()
    return RunStatus(
        run=run_log.run,
        state="ended" if ended else ("running" if any_event else "not started"),
        at=rfc3339(now_us),
        newest_version=fold.newest,
        live_version=fold.live,
        newest_step=None if fold.newest is None else fold.versions[fold.newest].depth,
        branches=branch_starts(fold),
        open_switch=_switch_words(fold),
        last_failure=fold.last_failure,
        switch_latency_s=switches.figures(),
        steps=ledger.steps,
        workers=workers,
        open_groups=len(open_groups),
        oldest_open_s=_age_s(min((g.issued_at_us for g in open_groups), default=None), now_us),
        trajectories_waiting=sum(waiting.values()),
        lag_histogram=_lags(ledger.last),
        dropped=dict(ledger.dropped.most_common()),
        dropped_groups=dict(ledger.dropped_groups.most_common()),
        never_trained=len(given_up),
        never_trained_first=tuple(given_up[:_SHOWN_PROMPTS]),
        tokens_per_s=sum(w.tokens_per_s for w in workers if w.standing == "admitted"),
        steps_per_minute=_rate(ledger.last, lambda s: 60.0),
        trajectories_per_s=_rate(ledger.last, lambda s: float(s.trajectories)),
        health={} if step is None else health(step.metrics),
        evaluation=evaluated_run(run_log),
        alarms=tuple(alarms(ledger.recent, limits)),
        waiting_for=() if ended else tuple(_waiting_for(fold, ledger.control, waiting, workers, now_us)),
    )


def health(metrics: Mapping[str, float]) -> dict[str, float]:
    """The few numbers of a step that a person looks at first."""
    found = {}
    for name, candidates in _HEALTH:
        value = next((metrics[key] for key in candidates if key in metrics), None)
        if value is not None:
            found[name] = value
    return found


def _read_ledger(run_log: RunLog, window_steps: int) -> _Ledger:
    ledger = _Ledger(
        None, 0, deque(maxlen=LAST_STEPS), deque(maxlen=window_steps), Counter(), Counter(), NeverTrainedPrompts()
    )
    for transaction in run_log.transactions():
        ledger.given_up.add(transaction)
        for row in transaction.decisions:
            if row.decision is Decision.DROPPED and row.subject is not Subject.RECORD:
                (ledger.dropped_groups if row.subject is Subject.GROUP else ledger.dropped)[row.reason] += 1
        if transaction.control is not None:
            ledger.control = transaction.control
        if isinstance(transaction.control, StepCompleted):
            ledger.steps += 1
            ledger.last.append(transaction.control)
            ledger.recent.append(transaction.control.metrics)
    return ledger


def _worker(name: str, fold: PolicyFold, beats: Mapping[tuple[str, str], Heartbeat], now_us: int) -> WorkerStatus:
    state = fold.workers[name]
    beat = beats.get((name, state.incarnation))
    return WorkerStatus(
        worker=name,
        incarnation=state.incarnation,
        standing=state.standing.value,
        state="silent" if beat is None else beat.state,
        version=None if beat is None else beat.version,
        heartbeat_age_s=_age_s(None if beat is None else beat.at_us, now_us),
        claims=() if beat is None else beat.claims,
        tokens_per_s=0.0 if beat is None else beat.tokens_per_s,
        idle_fraction=None if beat is None else beat.idle_fraction,
    )


def _undecided_rows(run_log: RunLog, control: AnyLedgerControl | None) -> Counter[str]:
    """group id -> rows in the log that no transaction has decided."""
    waiting: Counter[str] = Counter()
    if control is None or isinstance(control, LedgerEnded):
        return waiting
    partitions = control.position.partitions
    start = {partition: min(p.undecided, default=p.next_offset) for partition, p in partitions.items()}
    for entry in run_log.trajectories(start=start):
        progress = partitions.get(entry.partition)
        if progress is None or entry.offset >= progress.next_offset or entry.offset in progress.undecided:
            for row in entry.rows:
                waiting[row.group_id] += 1
    return waiting


def _waiting_for(
    fold: PolicyFold,
    control: AnyLedgerControl | None,
    waiting: Mapping[str, int],
    workers: Sequence[WorkerStatus],
    now_us: int,
) -> list[str]:
    if control is None:
        return ["its first transaction"]
    if not any(worker.standing in ("joined", "admitted") for worker in workers):
        return ["a worker: none is there"]
    if fold.live is None:
        return ["the first version to go live"]
    claimed = {group_id: worker.worker for worker in workers for group_id in worker.claims}
    depth = fold.versions[fold.newest].depth if fold.newest in fold.versions else 0
    groups = sorted(control.position.open_groups, key=lambda g: (g.intended_step, g.request_position))
    due = [group for group in groups if group.intended_step <= depth] or groups
    missing = [group for group in due if not waiting.get(group.group_id)]
    words = [_group_words(group, claimed.get(group.group_id), now_us) for group in missing[:_SHOWN_GROUPS]]
    if len(missing) > _SHOWN_GROUPS:
        words.append(f"{len(missing) - _SHOWN_GROUPS} more groups of that step")
    return words or (["nothing: the groups of its next step are in the log"] if due else ["its closing transaction"])


def _group_words(group: OpenGroup, worker: str | None, now_us: int) -> str:
    who = f"claimed by {worker}" if worker else "claimed by nobody"
    age_s = max(0.0, (now_us - group.issued_at_us) / 1e6)
    return f"group {group.group_id} (request {group.request_position}, issued {age_s:.1f} s ago, {who})"


def _switch_words(fold: PolicyFold) -> str:
    if fold.switch is None:
        return ""
    event: ev.SwitchStarted = fold.switch.event
    names = ", ".join(sorted(worker for worker, _ in fold.switch.waiting_for)) or "its activation"
    proven = f"{len(fold.switch.acks)} of {len(fold.switch.remaining)} proven"
    return f"to version {event.version} ({proven}), waits for {names}"


def _lags(steps: Sequence[StepCompleted] | deque[StepCompleted]) -> dict[str, int]:
    found: Counter[int] = Counter()
    for step in steps:
        for name, value in step.metrics.items():
            prefix, _, lag = name.rpartition("_")
            if prefix == "policy_lag/count" and lag.isdecimal():
                found[int(lag)] += int(value)
    return {str(lag): count for lag, count in sorted(found.items())}


def _rate(steps: deque[StepCompleted], amount: Any) -> float | None:
    """Amount a second of the steps after the first one shown."""
    if len(steps) < 2:
        return None
    elapsed_s = (steps[-1].at_us - steps[0].at_us) / 1e6
    return sum(amount(step) for step in list(steps)[1:]) / elapsed_s if elapsed_s > 0 else None


def _age_s(at_us: int | None, now_us: int) -> float | None:
    return None if at_us is None else max(0.0, (now_us - at_us) / 1e6)


def _worker_line(worker: WorkerStatus) -> str:
    age = "no heartbeat" if worker.heartbeat_age_s is None else f"heartbeat {worker.heartbeat_age_s:.1f} s ago"
    who = f"worker {worker.worker}/{worker.incarnation}: {worker.standing}, {worker.state}"
    work = f"version {_or_none(worker.version)}, {len(worker.claims)} claims, {worker.tokens_per_s:.0f} tokens/s"
    return f"{who}, {work}, {age}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)
