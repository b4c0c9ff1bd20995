"""What the policy topic says of versions, switches and workers, in the order of the log. Fed entries; reads nothing.

Bounded: a few numbers a version (as the fold itself keeps), and for each worker a histogram of what it was doing.
Times are producers' clocks: on several machines the parts of a switch carry the difference between them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from consumers.offline.report.bins import Histogram
from consumers.offline.run_log import PolicyEntry
from schemas import policy_events as ev

LANE_STATES = ("serving", "fetching", "loading", "waiting", "joining", "out")
"""what a worker does: serving; fetching (serves on); loading (drains, loads, proves); waiting for the others' proofs;
joining: there, nothing proven yet; out: lost its standing"""
KEPT_PROOFS = 24
"""versions whose proofs are kept one by one"""
KEPT_EVENTS = 40
"""failed loads and failed switches that are told one by one"""
WHOLE = "publish to live"
STEPS = ("publish to start", "start to last proof", "last proof to live")
"""parts of it, one value a switch"""
WORK = {"fetching": "fetch", "draining": "drain", "loading": "load and prove", "proving": "prove"}
"""what a worker's proof tells of its own time -> words, one value a worker and switch"""
PHASES = (WHOLE, *STEPS[:2], *WORK.values(), STEPS[2])
"""in the order in which they are shown"""
_STOPPED = ("draining", "loading", "proving")
_LANE_BIN_S = 2.0**-6


@dataclass(slots=True, kw_only=True)
class VersionLife:
    """One version; times in microseconds since 1970, None: it did not happen."""

    version: int
    parent: int | None
    depth: int
    size_bytes: int
    published_us: int
    started_us: int | None = None
    live_us: int | None = None
    failed_us: int | None = None
    """its last failed switch"""
    retired_us: int | None = None
    is_superseded: bool = False
    """jumped over by a switch to a newer one"""
    is_pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A failed load, a failed switch, or a worker that was taken out."""

    at_us: int
    what: str
    subject: str
    detail: str


@dataclass(slots=True)
class _Lane:
    """One worker, whatever its incarnation."""

    state: str = ""
    """"" : it is not there"""
    since_us: int = 0
    spans: dict[str, Histogram] = field(default_factory=dict)


class PolicyReading:
    """Feed it every entry of the topic."""

    def __init__(self) -> None:
        self.lives: dict[int, VersionLife] = {}
        self.phases: dict[str, array[float]] = {}
        """phase -> seconds, one value a switch or a worker's load"""
        self.switch_versions: array[int] = array("q")
        """versions that went live, beside phases[WHOLE]"""
        self.recent_proofs: dict[int, list[tuple[str, int]]] = {}
        """version -> (worker, time) of the proofs it went live on, last versions only"""
        self.troubles: list[Trouble] = []
        self.trouble_counts: dict[str, int] = {}
        self.lanes: dict[str, _Lane] = {}
        self.started_us: int | None = None
        self.newest_us = 0
        self.ended_us: int | None = None
        self.end_reason = ""
        self.revisions: list[str] = []
        self.void_events = 0
        self.read_up_to = 0
        self.weak_proofs = self.proofs = 0
        self._started: ev.SwitchStarted | None = None
        self._loads: dict[int, ev.VersionLoaded] = {}

    def add(self, entry: PolicyEntry) -> None:
        """Count one event, if it counts."""
        self.read_up_to = entry.offset + 1
        event = entry.event
        if event is None or not entry.is_legal:
            self.void_events += 1
            return
        self.newest_us = max(self.newest_us, event.at_us)
        if isinstance(event, ev.RunStarted):
            self.started_us = event.at_us if self.started_us is None else self.started_us
            self.ended_us, self.end_reason = None, ""
            self.revisions += [event.code_revision] * (event.code_revision not in self.revisions)
        elif isinstance(event, ev.RunEnded):
            self.ended_us, self.end_reason = event.at_us, event.reason
            for worker in self.lanes:
                self._turn(worker, "", event.at_us)
        else:
            self._version(event)
            self._worker(event, entry.offset)

    # ------------------------------------------------------------------ versions

    def _version(self, event: ev.AnyPolicyEvent) -> None:
        if isinstance(event, ev.VersionPublished):
            self.lives[event.version] = VersionLife(
                version=event.version, parent=event.parent, depth=event.depth, size_bytes=event.bytes,
                published_us=event.at_us,
            )  # fmt: skip
        elif isinstance(event, ev.SwitchStarted):
            self._started, self._loads = event, {}
            self.lives[event.version].started_us = event.at_us
        elif isinstance(event, ev.VersionActivated):
            self._activated(event)
        elif isinstance(event, ev.VersionFailed):
            self.lives[event.version].failed_us = event.at_us
            self._tell(event.at_us, "switch failed", f"version {event.version}", event.reason)
        elif isinstance(event, ev.VersionRetired):
            self.lives[event.version].retired_us = event.at_us
        elif isinstance(event, ev.VersionPinned | ev.VersionUnpinned):
            self.lives[event.version].is_pinned = isinstance(event, ev.VersionPinned)

    def _activated(self, event: ev.VersionActivated) -> None:
        life = self.lives[event.version]
        life.live_us = event.at_us
        older = event.version - 1
        while older >= 0 and self.lives[older].live_us is None and not self.lives[older].is_superseded:
            self.lives[older].is_superseded = True
            older -= 1
        loads = [self._loads[offset] for offset in event.acks if offset in self._loads]
        started_us = life.published_us if life.started_us is None else life.started_us
        acked_us = max((load.at_us for load in loads), default=event.at_us)
        self._seconds(WHOLE, event.at_us - life.published_us)
        self.switch_versions.append(event.version)
        parts_us = (started_us - life.published_us, acked_us - started_us, event.at_us - acked_us)
        for name, us in zip(STEPS, parts_us, strict=True):
            self._seconds(name, us)
        for load in loads:
            for name, words in WORK.items():
                if name in load.phase_s:
                    self._seconds(words, load.phase_s[name] * 1e6)
        self.recent_proofs[event.version] = [(load.worker, load.at_us) for load in loads]
        if len(self.recent_proofs) > KEPT_PROOFS:
            del self.recent_proofs[next(iter(self.recent_proofs))]

    def _seconds(self, phase: str, us: float) -> None:
        self.phases.setdefault(phase, array("d")).append(max(0.0, us / 1e6))

    # ------------------------------------------------------------------ workers

    def _worker(self, event: ev.AnyPolicyEvent, offset: int) -> None:
        if isinstance(event, ev.WorkerJoined):
            self._turn(event.worker, "joining", event.at_us)
        elif isinstance(event, ev.WorkerLeft):
            self._turn(event.worker, "", event.at_us)
        elif isinstance(event, ev.WorkerExpired):
            self._turn(event.worker, "" if event.reason == "lease" else "out", event.at_us)
            self._tell(event.at_us, "worker taken out", f"{event.worker}/{event.incarnation}", event.reason)
        elif isinstance(event, ev.VersionLoaded):
            self._loaded(event, offset)
        elif isinstance(event, ev.LoadFailed):
            self._turn(event.worker, "out", event.at_us)
            subject = f"version {event.version} on {event.worker}/{event.incarnation}"
            self._tell(event.at_us, "load failed", subject, event.reason)
        elif isinstance(event, ev.VersionActivated):
            for load in self._loads.values():
                self._turn(load.worker, "serving", event.at_us)
        elif isinstance(event, ev.WorkerAdmitted):
            self._turn(event.worker, "serving", event.at_us)

    def _loaded(self, event: ev.VersionLoaded, offset: int) -> None:
        """The proof tells how long its parts took, so the time before it is divided afterwards."""
        self.proofs += 1
        self.weak_proofs += event.weak
        if event.switch is not None:
            self._loads[offset] = event
        stopped_us = round(1e6 * sum(event.phase_s.get(name, 0.0) for name in _STOPPED))
        fetching_us = round(1e6 * event.phase_s.get("fetching", 0.0))
        self._turn(event.worker, "fetching", event.at_us - stopped_us - fetching_us)
        self._turn(event.worker, "loading", event.at_us - stopped_us)
        rolling = self._started is not None and self._started.mode == "rolling" and event.switch is not None
        self._turn(event.worker, "serving" if rolling else "waiting", event.at_us)

    def _turn(self, worker: str, state: str, at_us: int) -> None:
        """The worker does something else from then on; clocks that disagree never make a stretch negative."""
        lane = self.lanes.setdefault(worker, _Lane(since_us=at_us))
        at_us = max(at_us, lane.since_us)
        self._span(lane, at_us)
        lane.state, lane.since_us = state, at_us

    def _span(self, lane: _Lane, until_us: int) -> None:
        if lane.state and self.started_us is not None:
            spans = lane.spans.setdefault(lane.state, Histogram(_LANE_BIN_S))
            spans.add_span((lane.since_us - self.started_us) / 1e6, (until_us - self.started_us) / 1e6)

    def _tell(self, at_us: int, what: str, subject: str, detail: str) -> None:
        self.trouble_counts[what] = self.trouble_counts.get(what, 0) + 1
        self.troubles.append(Trouble(at_us=at_us, what=what, subject=subject, detail=detail[:300]))
        if len(self.troubles) > KEPT_EVENTS:
            del self.troubles[0]

    # ------------------------------------------------------------------ afterwards

    @property
    def end_us(self) -> int:
        """The end of the run, or the newest event while it is under way."""
        return self.newest_us if self.ended_us is None else self.ended_us

    @property
    def wall_s(self) -> float:
        """From the first event to the end."""
        return 0.0 if self.started_us is None else max(0.0, (self.end_us - self.started_us) / 1e6)

    def lane_shares(self) -> dict[str, tuple[float, Mapping[str, list[float]]]]:
        """worker -> (width of a bin in seconds, state -> share of each bin); stretches still open end with the log."""
        found: dict[str, tuple[float, Mapping[str, list[float]]]] = {}
        for worker, lane in sorted(self.lanes.items()):
            if lane.state:
                self._turn(worker, lane.state, max(self.newest_us, lane.since_us))
            for spans in lane.spans.values():
                spans.reach(self.wall_s)
            widest = max((spans.width for spans in lane.spans.values()), default=_LANE_BIN_S)
            for spans in lane.spans.values():
                while spans.width < widest:
                    spans.reach(spans.width * len(spans.weights))
            bins = max((spans.filled() for spans in lane.spans.values()), default=0)
            shares = {
                state: [weight / widest for weight in lane.spans[state].weights[:bins]]
                for state in LANE_STATES
                if state in lane.spans
            }
            found[worker] = widest, shares
        return found
