"""What the processes of a run use while it goes on: /proc of every service, read again and again.

The broker and the program that measures are not services.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.short_runs import Stage

SAMPLE_S = 1.0
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at one process."""

    at_us: int
    resident: int
    """bytes"""
    anonymous: int
    """bytes of it that no file stands behind"""
    cpu_s: float
    """since the process began, user and system"""


def sample(pid: int) -> Sample | None:
    """None when the process is gone, or on its way (it has no memory then)."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "RssAnon"):
                sizes[name] = int(rest.split()[0]) * 1024
        # The second field is the program's name in brackets, which may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return Sample(
            at_us=time.time_ns() // 1000,
            resident=sizes["VmRSS"],
            anonymous=sizes["RssAnon"],
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_S,
        )
    return None


def pids_of(at: Stage, name: str) -> dict[str, int]:
    """The services of a run that are alive, by the name of their process."""
    found: dict[str, int] = {}
    for file in at.directory(name).pids.glob("*"):
        with contextlib.suppress(OSError, ValueError):
            found[file.name.partition(".")[0]] = int(file.read_text(encoding="ascii"))
    return found


def watch(at: Stage, name: str, sets: Sequence[str], limit_s: float) -> dict[str, list[Sample]]:
    """Run to the end; the samples of every service."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    deadline_s = time.monotonic() + limit_s
    with at.started(name, sets) as up:
        while up.poll() is None and time.monotonic() < deadline_s:
            for service, pid in pids_of(at, name).items():
                if (found := sample(pid)) is not None:
                    samples[service].append(found)
            time.sleep(SAMPLE_S)
        at.end(up, name, 1.0)
    return dict(samples)


def cpu_between(samples: Mapping[str, Sequence[Sample]], from_us: int, to_us: int) -> float:
    """CPU seconds of all services between two times, by the samples next to them."""
    total_s = 0.0
    for rows in samples.values():
        times = [row.at_us for row in rows]
        first, last = (min(len(rows) - 1, bisect_left(times, at_us)) for at_us in (from_us, to_us))
        total_s += rows[last].cpu_s - rows[first].cpu_s
    return total_s
