"""What bench_switching makes of a log: the window, the latencies, and heartbeats that say the same thing twice."""

from __future__ import annotations

import pytest

from benchmarks.bench_switching import Measured, idle_of, mean_of, quantile, stopped_ms, switches_of, table
from schemas.heartbeat import Heartbeat
from schemas.policy_events import VersionActivated
from tests.fakes.log_script import G0, PolicyScript


def beat(at_us: int, idle: float, rate: float = 1.0, worker: str = "g0") -> Heartbeat:
    return Heartbeat(
        run="demo", at_us=at_us, worker=worker, incarnation="i1", sequence=0, state="serving", version=0, claims=(),
        tokens_total=0, groups_total=0, tokens_per_s=rate, idle_fraction=idle,
    )  # fmt: skip


def measured(value: float) -> Measured:
    return Measured(**dict.fromkeys(Measured.__dataclass_fields__, value))


def test_a_heartbeat_that_repeats_its_window_counts_once_and_those_outside_never() -> None:
    beats = [beat(5, 1.0), beat(11, 0.5), beat(12, 0.5), beat(13, 0.0, 2.0), beat(14, 0.7, worker="g1"), beat(30, 1.0)]

    assert idle_of(beats, 10, 20) == pytest.approx((0.5 + 0.0 + 0.7) / 3)
    assert idle_of([], 10, 20) == 0.0


def test_the_window_runs_from_the_first_activation_after_the_warm_up_to_the_last() -> None:
    script = PolicyScript()
    script.started()
    script.joined(G0)
    for version in range(6):
        script.goes_live(version, [G0])
    events = [
        event.model_copy(update={"at_us": 100 * place}) if isinstance(event, VersionActivated) else event
        for place, event in enumerate(script.events)
    ]
    switches = switches_of(events)

    assert switches.window(2) == (switches.live_us[2], switches.live_us[5], 3)
    assert len(switches.loaded) == 6
    with pytest.raises(SystemExit, match="more --versions"):
        switches.window(5)


def test_a_worker_is_stopped_until_its_ack_in_rolling_mode_and_until_the_activation_otherwise() -> None:
    script = PolicyScript()
    script.started()
    script.joined(G0)
    script.goes_live(0, [G0])
    switches = switches_of(script.events)
    switches.live_us[0] = 70_000
    [loaded] = switches.loaded
    loads = [loaded.model_copy(update={"at_us": 20_000, "phase_s": {"draining": 9.0, "loading": 0.03}})]

    assert stopped_ms(switches, loads, rolling=True) == [pytest.approx(30.0)]
    assert stopped_ms(switches, loads, rolling=False) == [pytest.approx(80.0)]


def test_quantiles_are_of_what_was_measured() -> None:
    assert [quantile([3.0, 1.0, 2.0], q) for q in (0.0, 0.5, 0.95)] == [1.0, 2.0, 3.0]
    assert quantile([], 0.5) == 0.0


def test_rounds_are_averaged_and_shown_in_one_row() -> None:
    mean = mean_of([measured(1.0), measured(3.0)])

    assert set(mean.values()) == {2.0}
    assert table({"short": mean}).splitlines()[-1].startswith("| short | 200% | 2 |")
