"""How long switches took, from the publication of a version until it was live, and by phase. From policy alone.

Times are those of the producers' clocks (trainer, workers, coordinator): on several machines the parts carry the
difference between them. Bounded: the last switches only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from consumers.offline.run_log import PolicyEntry
from schemas import policy_events as ev

LAST_SWITCHES = 100
WHOLE = "published_to_live"
PARTS = ("published_to_started", "started_to_acks", "acks_to_live")
WORKER = "worker_"
"""prefix of what the workers say of their own loading; all workers of a switch count"""

Latencies = Mapping[str, Mapping[str, float]]
"""phase -> p50, p95 in seconds and count; empty when nothing was activated"""


class SwitchLatencies:
    """Feed it the entries of policy in order."""

    def __init__(self) -> None:
        self._published_us: dict[int, int] = {}
        self._started: ev.SwitchStarted | None = None
        self._loads: dict[int, ev.VersionLoaded] = {}
        self._switches: deque[list[tuple[str, float]]] = deque(maxlen=LAST_SWITCHES)

    def add(self, entry: PolicyEntry) -> None:
        """Count one event, if it counts."""
        event = entry.event
        if not entry.is_legal:
            return
        if isinstance(event, ev.VersionPublished):
            self._published_us[event.version] = event.at_us
        elif isinstance(event, ev.SwitchStarted):
            self._started, self._loads = event, {}
        elif isinstance(event, ev.VersionLoaded) and event.switch is not None:
            self._loads[entry.offset] = event
        elif isinstance(event, ev.VersionActivated) and self._started is not None:
            self._switches.append(self._phases(self._started, event))
            self._published_us = {v: us for v, us in self._published_us.items() if v > event.version}

    def figures(self) -> dict[str, dict[str, float]]:
        """p50, p95 and number by phase, in the order in which they happen."""
        values: dict[str, list[float]] = {}
        for switch in self._switches:
            for name, seconds in switch:
                values.setdefault(name, []).append(seconds)
        return {
            name: {
                "p50": round(quantile(found, 0.5), 4), "p95": round(quantile(found, 0.95), 4), "count": len(found),
            }
            for name, found in values.items()
        }  # fmt: skip

    def _phases(self, started: ev.SwitchStarted, activated: ev.VersionActivated) -> list[tuple[str, float]]:
        published_us = self._published_us[activated.version]
        loads = [self._loads[offset] for offset in activated.acks]
        acked_us = max(load.at_us for load in loads)
        parts_us = (started.at_us - published_us, acked_us - started.at_us, activated.at_us - acked_us)
        phases = [(WHOLE, (activated.at_us - published_us) / 1e6)]
        phases += [(name, us / 1e6) for name, us in zip(PARTS, parts_us, strict=True)]
        return phases + [(WORKER + name, seconds) for load in loads for name, seconds in load.phase_s.items()]


def latency_lines(latencies: Latencies) -> list[str]:
    """For a person; nothing when no version was activated."""
    if not latencies:
        return []

    def spelt(name: str) -> str:
        return f"{name.removeprefix(WORKER).replace('_', ' ')} {_seconds(latencies[name])}"

    count = latencies[WHOLE]["count"]
    lines = [
        f"switches (last {count:.0f}): live after {_seconds(latencies[WHOLE])}; "
        + ", ".join(spelt(name) for name in PARTS)
    ]
    workers = [name for name in latencies if name.startswith(WORKER)]
    return lines + ["  in the workers: " + ", ".join(map(spelt, workers))] * bool(workers)


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between the two values beside it.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _seconds(figures: Mapping[str, Any]) -> str:
    return f"{figures['p50']:.2f} s (p95 {figures['p95']:.2f})"
