"""Draws a RunState: a live panel on a terminal, one line every few seconds elsewhere. Always on stderr.

Drawing is text from values; nothing here reads the log or decides anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from driftlog.view_state import RunState
from infra.config_trainer import AlarmsSection
from infra.metrics_alarms import alarms

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

PLAIN_EVERY_S = 5.0
_BARS = "\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}\N{LOWER HALF BLOCK}"
_BARS += "\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
_ASCII_BARS = "_.-=+*#@"
_LATEST_STEPS = 10


class View:
    """Shows the progress of a run; `update` as often as you like, it draws as often as asked."""

    def __init__(
        self,
        run: str,
        versions: int,
        refresh_s: float,
        *,
        console: Console | None = None,
        alarms: AlarmsSection | None = None,
    ) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._run = run
        self._versions = versions
        self._alarms = alarms
        self._every_s = refresh_s if self._console.is_terminal else max(refresh_s, PLAIN_EVERY_S)
        self._live: Live | None = None
        self._drawn_at_s = float("-inf")
        self._last_line = ""

    def __enter__(self) -> View:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, words: str) -> None:
        """One message; above the panel where there is one."""
        self._console.print(words, markup=False, highlight=False, soft_wrap=True)

    def update(self, state: RunState, now_s: float, services: Mapping[str, str], *, force: bool = False) -> None:
        """Draw if it is time. `services`: name -> what it is doing."""
        if not force and now_s - self._drawn_at_s < self._every_s:
            return
        self._drawn_at_s = now_s
        if self._live is not None:
            unicode = (self._console.encoding or "").lower().startswith("utf")
            self._live.update(
                panel(state, self._run, self._versions, services, unicode=unicode, limits=self._alarms), refresh=True
            )
            return
        line = plain_line(state, self._versions, self._alarms)
        if line != self._last_line:
            self.say(line)
            self._last_line = line


def plain_line(state: RunState, versions: int, limits: AlarmsSection | None = None) -> str:
    """The run in one line."""
    newest = "-" if state.newest is None else str(state.newest)
    live = "-" if state.fold.live is None else str(state.fold.live)
    done = (
        f"version {newest}/{versions}" if not _is_branched(state) else f"version {newest}, step {state.step}/{versions}"
    )
    words = [f"{done} (live {live})"]
    words += [f"success {_number(state.success(_LATEST_STEPS))}"]
    words += [f"lag {_histogram_text(state.lags)}", f"{state.tokens_per_s():.0f} tokens/s"]
    words += [f"{_number(state.versions_per_s())} versions/s", f"{state.open_groups} groups open"]
    words += [f"dropped {_counts_text(state.drops)}", f"clip {_number(state.metric('actor/pg_clipfrac'))}"]
    words += [f"ESS {_number(state.metric('actor/ratio_ess'))}", f"KL {_number(state.metric('actor/ppo_kl'), 4)}"]
    words += [] if state.evaluation is None else [f"evaluation of {state.evaluation.words}"]
    words += [f"workers {_standings(state)}", *(f"ALARM {alarm}" for alarm in _alarms(state, limits))]
    return "  ".join(words)


def panel(
    state: RunState,
    run: str,
    versions: int,
    services: Mapping[str, str],
    *,
    unicode: bool = True,
    limits: AlarmsSection | None = None,
) -> RenderableType:
    """The run as a panel of a terminal."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    newest = "-" if state.newest is None else state.newest
    live = "-" if state.fold.live is None else state.fold.live
    bar = _progress_bar(state.step, versions, unicode=unicode)
    of = (
        f"{newest} of {versions} published"
        if not _is_branched(state)
        else f"step {state.step} of {versions}, {newest} newest"
    )
    speed = state.versions_per_s()
    rows = [
        ("versions", f"{bar} {of}, {live} live" + (f", {speed:.1f}/s" if speed else "")),
        ("success", f"{_number(state.success(_LATEST_STEPS))}  {_success_line(state, unicode=unicode)}"),
        ("evaluation", "" if state.evaluation is None else state.evaluation.words),
        ("policy lag", _histogram_bars(state.lags, unicode=unicode)),
        ("generation", f"{state.tokens_per_s():,.0f} tokens/s, {state.open_groups} groups open"),
        ("dropped", _counts_text(state.drops)),
        ("update", _update_text(state)),
        ("alarms", "\n".join(_alarms(state, limits))),
        ("workers", _workers_text(state)),
        ("services", "  ".join(f"{name} {doing}" for name, doing in services.items())),
    ]
    for name, value in rows:
        if not value:
            continue
        grid.add_row(name, Text(value, overflow="fold"))
    return Panel(grid, title=Text(f"driftlog {run}"), title_align="left")


def sparkline(values: Sequence[float], width: int, *, low: float = 0.0, high: float = 1.0, unicode: bool = True) -> str:
    """Values as bars; more values than width are averaged in equal parts.

    >>> sparkline([0.0, 0.5, 1.0], 3, unicode=False)
    '_+@'
    """
    if not values:
        return ""
    bars = _BARS if unicode else _ASCII_BARS
    parts = min(width, len(values))
    edges = [len(values) * part // parts for part in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    top = len(bars) - 1
    return "".join(bars[max(0, min(top, int((mean - low) / (high - low) * len(bars))))] for mean in means)


def _is_branched(state: RunState) -> bool:
    """Version numbers and training steps are not the same."""
    return state.newest is not None and state.newest != state.step


def _success_line(state: RunState, *, unicode: bool) -> str:
    return sparkline([step.success for step in state.steps if step.success is not None], 50, unicode=unicode)


def _progress_bar(done: int, of: int, *, unicode: bool, width: int = 24) -> str:
    filled = min(width, width * done // max(1, of))
    full, empty = ("\N{FULL BLOCK}", "\N{LIGHT SHADE}") if unicode else ("#", ".")
    return full * filled + empty * (width - filled)


def _histogram_text(lags: Mapping[int, int]) -> str:
    total = sum(lags.values())
    return " ".join(f"{lag}:{count / total:.0%}" for lag, count in sorted(lags.items())) if total else "-"


def _histogram_bars(lags: Mapping[int, int], *, unicode: bool, width: int = 20) -> str:
    total = sum(lags.values())
    block = "\N{FULL BLOCK}" if unicode else "#"
    parts = []
    for lag, count in sorted(lags.items()):
        parts.append(f"{lag} {block * max(1, round(width * count / total))} {count / total:.0%}")
    return "   ".join(parts) or "-"


def _counts_text(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {reason}" for reason, count in ordered) or "nothing"


def _alarms(state: RunState, limits: AlarmsSection | None) -> list[str]:
    return alarms([step.metrics for step in state.steps], limits)


def _standings(state: RunState) -> str:
    workers = state.workers()
    admitted = sum(standing == "admitted" for _, standing, _ in workers)
    return f"{admitted}/{len(workers)}"


def _update_text(state: RunState) -> str:
    words = (
        ("clipped", "actor/pg_clipfrac", 2),
        ("ESS", "actor/ratio_ess", 2),
        ("KL", "actor/ppo_kl", 4),
        ("entropy", "actor/entropy", 2),
        ("trainer idle", "trainer/idle_fraction", 2),
    )
    return "  ".join(f"{word} {_number(state.metric(name), digits)}" for word, name, digits in words)


def _workers_text(state: RunState) -> str:
    parts = []
    for name, standing, beat in state.workers():
        if beat is None:
            parts.append(f"{name} {standing}")
        else:
            version = "-" if beat.version is None else beat.version
            parts.append(
                f"{name} {standing}, {beat.state} v{version}, {len(beat.claims)} claims, idle {beat.idle_fraction:.0%}"
            )
    return "\n".join(parts) or "none yet"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
