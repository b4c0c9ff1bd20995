"""Prompts that kill workers: found in the last heartbeats of the dead, and not generated a third time."""

from __future__ import annotations

from pathlib import Path

from infra.ports import Message
from producers.claim_watch import ClaimWatch
from schemas.headers import event_type, header_text, json_headers
from schemas.heartbeat import Heartbeat
from schemas.topics import TopicName
from tests.fakes.log_script import running
from tests.fakes.memory_log import MemoryLog
from tests.fakes.virtual_clock import VirtualClock
from tests.unit.generator.generator_rig import GeneratorRig

GROUP = "demo/p000001/e0/a0"


def name(position: int) -> str:
    return f"demo/p{position:06d}/e0/a0"


def beat(worker: str, incarnation: str, *claims: str) -> Message:
    heartbeat = Heartbeat(
        run="demo", at_us=0, worker=worker, incarnation=incarnation, sequence=0, state="serving", version=0,
        claims=claims, tokens_total=0, groups_total=0, tokens_per_s=0.0, idle_fraction=0.0,
    )  # fmt: skip
    value = heartbeat.model_dump_json().encode()
    headers = json_headers(event_type="Heartbeat", source="t", value=value, at_us=0)
    return Message(topic="demo.workers", key=f"{worker}/{incarnation}".encode(), value=value, headers=headers)


def test_only_incarnations_that_are_gone_count_and_only_their_last_words() -> None:
    log = MemoryLog(VirtualClock())
    log.create_topic("demo.workers", 1)
    writer = log.client("t").writer()
    watch = ClaimWatch(log.client("t").reader({"demo.workers": 1}, "beginning"))
    script, _ = running(("g0", "i1"), ("g1", "i1"))
    for message in (
        beat("g0", "i1", GROUP), beat("g1", "i1", GROUP), beat("g1", "i0", GROUP), beat("g2", "i0", GROUP),
        beat("g2", "i0"),
    ):  # fmt: skip
        writer.send(message)
    watch.advance()
    at_first = watch.deaths(script.fold, GROUP)
    script.expired(("g0", "i1"))

    assert at_first == [("g1", "i0")], "g0 and g1/i1 live; g2 died with nothing in hand"
    assert watch.deaths(script.fold, GROUP) == [("g0", "i1"), ("g1", "i0")]


def test_a_request_found_in_two_dead_incarnations_goes_to_the_dead_letters(tmp_path: Path) -> None:
    rig = GeneratorRig(tmp_path).serving()
    for incarnation in ("old1", "old2"):
        rig.others.send(beat("g9", incarnation, name(3)))
    rig.ask(3, 4)
    rig.until(lambda: rig.groups() == [name(4)])
    (dead,) = rig.records(TopicName.DEADLETTERS)
    (asked,) = [record for record in rig.records(TopicName.PROMPTS) if record.partition == 3]

    assert (dead.key, dead.value) == (name(3).encode(), asked.value)
    assert header_text(dead.headers, "dead-code") == "poison_prompt"
    assert event_type(dead.headers) == event_type(asked.headers)
    rig.step(5)
    assert rig.groups() == [name(4)]
    assert rig.committed(3) == 1, "it is done with: a restart does not find it again"


def test_a_worker_claims_nothing_before_it_has_read_the_last_words_of_everybody(tmp_path: Path) -> None:
    """Found by the simulator: one poll brings at most 500 heartbeats, and the deaths stood behind them."""
    rig = GeneratorRig(tmp_path)
    for number in range(1300):
        rig.others.send(beat("g8", f"life{number}"))
    for incarnation in ("old1", "old2"):
        rig.others.send(beat("g9", incarnation, name(3)))
    rig.serving()
    rig.ask(3, 4)
    rig.until(lambda: rig.groups() == [name(4)])

    assert len(rig.records(TopicName.DEADLETTERS)) == 1
