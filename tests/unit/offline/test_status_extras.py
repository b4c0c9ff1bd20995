"""What `status` and `summary` say of switches and of prompts that were given up; the list of the latter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from consumers.offline.never_trained import NeverTrainedPrompts, never_trained
from consumers.offline.run_log import LedgerTransaction, PolicyEntry
from consumers.offline.status import status
from consumers.offline.summary import summarise
from consumers.offline.switch_latency import LAST_SWITCHES, SwitchLatencies, latency_lines
from schemas import policy_events as ev
from schemas.ledger import Decision, DecisionRow, OpenGroup, Position, Settled
from schemas.policy_state import Void
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN, group_decision

PHASES = {"fetching": 0.25, "proving": 0.5}

# ---------------------------------------------------------------------- switches


def second(at_s: float) -> int:
    return round(at_s * 1e6)


def tell(latencies: SwitchLatencies, events: Sequence[ev.AnyPolicyEvent], offset: int = 0) -> None:
    for number, event in enumerate(events):
        latencies.add(PolicyEntry(offset=offset + number, event=event, void=None))


def switch(version: int, times_s: Sequence[float], *, offset: int, acks: Sequence[int]) -> list[ev.AnyPolicyEvent]:
    """Published, started, two loads, activated at these times; `acks`: which of the loads count."""
    published, started, first, last, activated = (second(at_s) for at_s in times_s)
    loads = [
        ev.VersionLoaded(
            run=RUN, at_us=at_us, switch="s", worker=worker, incarnation="i", version=version, manifest_sha256="m",
            probe_diff_new=0.0, probe_diff_old=1.0, probe_tolerance=1e-4, phase_s=PHASES,
        )
        for worker, at_us in (("g0", first), ("g1", last))
    ]  # fmt: skip
    return [
        ev.VersionPublished(
            run=RUN, at_us=published, version=version, parent=None, depth=0, manifest_uri="m", manifest_sha256="m",
            bytes=1, optimizer_step=0, oldest_open_request=0,
        ),
        ev.SwitchStarted(
            run=RUN, at_us=started, switch="s", version=version, mode="barrier", read_up_to=0, required=(),
            deadline_s=1.0,
        ),
        *loads,
        ev.VersionActivated(
            run=RUN, at_us=activated, switch="s", version=version, acks=tuple(offset + 2 + which for which in acks)
        ),
    ]  # fmt: skip


def test_a_switch_is_told_by_phase_and_the_last_ack_that_counts_ends_the_waiting() -> None:
    latencies = SwitchLatencies()
    tell(latencies, switch(1, (10.0, 10.5, 11.0, 13.0, 13.25), offset=0, acks=(0, 1)))
    both = latencies.figures()
    tell(latencies, switch(2, (20.0, 20.5, 21.0, 29.0, 21.25), offset=5, acks=(0,)), offset=5)
    found = latencies.figures()

    assert {name: figures["p50"] for name, figures in both.items()} == {
        "published_to_live": 3.25, "published_to_started": 0.5, "started_to_acks": 2.5, "acks_to_live": 0.25,
        "worker_fetching": 0.25, "worker_proving": 0.5,
    }  # fmt: skip
    assert found["started_to_acks"] == {"p50": 1.5, "p95": 2.4, "count": 2}
    assert found["worker_proving"]["count"] == 3, "a worker that was taken out does not count"


def test_only_the_last_switches_count_and_void_events_never() -> None:
    latencies = SwitchLatencies()
    for number in range(LAST_SWITCHES + 5):
        slow = 100.0 if number < 5 else 1.0
        times_s = (number, number + slow, number + slow, number + slow, number + slow)
        tell(latencies, switch(number, times_s, offset=number * 5, acks=(0, 1)), number * 5)
    void = Void(offset=999, type="VersionActivated", reason="planted")
    latencies.add(PolicyEntry(offset=999, event=switch(0, (0.0,) * 5, offset=0, acks=(0, 1))[-1], void=void))
    figures = latencies.figures()["published_to_live"]

    assert figures == {"p50": 1.0, "p95": 1.0, "count": LAST_SWITCHES}


def test_without_switches_nothing_is_said() -> None:
    assert latency_lines(SwitchLatencies().figures()) == []


def test_status_and_summary_tell_how_long_switches_took(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    told, summary = status(run.run_log(), now_us=0), summarise(run.run_log())

    assert told.switch_latency_s == summary.switch_latency_s
    assert told.switch_latency_s["published_to_live"]["count"] == 4
    assert "switches (last 4): live after" in told.text()
    assert "published_to_started" in json.loads(told.to_json())["switch_latency_s"]
    assert (summary.newest_version, summary.newest_step, summary.branches) == (3, 3, ())


# ---------------------------------------------------------------------- never trained


def transaction(rows: Sequence[DecisionRow], open_groups: Sequence[str] = ()) -> LedgerTransaction:
    still_open = tuple(
        OpenGroup(group_id=group, request_position=0, issued_at_us=0, attempt=0, intended_step=0)
        for group in open_groups
    )
    position = Position(open_groups=still_open, next_request=0, prompt_cursor=0, partitions={})
    control = Settled(run=RUN, at_us=0, position=position, policy_read_up_to=0, reason="decisions")
    return LedgerTransaction(number=0, offset=0, decisions=tuple(rows), control=control)


def dropped(group: str, reason: str) -> DecisionRow:
    return group_decision(f"{RUN}/{group}", Decision.DROPPED, reason, 0)


def test_a_prompt_is_given_up_when_it_was_dropped_and_not_asked_for_again() -> None:
    prompts = NeverTrainedPrompts()
    prompts.add(transaction([dropped("p000001/e0/a0", "lost"), dropped("p000002/e0/a0", "stale")]))
    prompts.add(transaction([dropped("p000001/e0/a1", "incomplete")], [f"{RUN}/p000002/e0/a1"]))
    trying = [(p.prompt, [a.reason for a in p.attempts]) for p in prompts.found()]
    prompts.add(transaction([group_decision(f"{RUN}/p000002/e0/a1", Decision.TRAINED, "", 0)]))

    assert trying == [(1, ["lost", "incomplete"])]
    assert [p.prompt for p in prompts.found()] == [1]


@pytest.mark.parametrize("reason", ["zero_variance", "run_ended"])
def test_the_filter_and_the_end_of_the_run_give_no_prompt_up(reason: str) -> None:
    prompts = NeverTrainedPrompts()
    prompts.add(transaction([dropped("p000001/e0/a0", "lost")]))
    prompts.add(transaction([dropped("p000001/e0/a1", reason)]))

    assert prompts.found() == []


def test_another_pass_over_the_prompts_is_another_chance() -> None:
    prompts = NeverTrainedPrompts()
    prompts.add(transaction([dropped("p000001/e0/a0", "poison_prompt")]))
    prompts.add(transaction([group_decision(f"{RUN}/p000001/e1/a0", Decision.TRAINED, "", 0)]))

    assert [p.words for p in prompts.found()] == [f"prompt 1, pass 0, 1 attempt: {RUN}/p000001/e0/a0: poison_prompt"]


def test_status_shows_the_number_and_the_first_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun(tmp_path)
    asked_again = never_trained(run.run_log())
    given_up = NeverTrainedPrompts()
    given_up.add(transaction([dropped(f"p{number:06d}/e0/a2", "lost") for number in range(5)]))
    found = given_up.found()
    monkeypatch.setattr(NeverTrainedPrompts, "found", lambda self: found)

    told = status(run.run_log(), now_us=0)

    assert asked_again == [], "the lost group of this run was trained at its second attempt"
    assert told.never_trained == 5
    assert "never trained: 5 prompts" in told.text()
    assert told.text().count("p00000") == 3
    assert json.loads(told.to_json())["never_trained_first"][0]["attempts"][0]["reason"] == "lost"
