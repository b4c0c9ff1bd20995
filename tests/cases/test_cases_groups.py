"""Public failure cases about prompt groups, through the real trainer service: C16, C19, C21, C46, C48, C50."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.ledger import Subject
from schemas.topics import TopicName
from tests.cases.trainer_rig import TrainerRig, numbers
from tests.fakes.log_script import G1


def ids(rig: TrainerRig, *positions: int) -> list[str]:
    return [request.group_id for request in rig.requests() if request.request_position in positions]


def trained(rig: TrainerRig) -> list[str]:
    return [name for name, decision, _ in rig.told() if decision == "trained"]


def test_c16_a_group_is_what_the_group_id_says_and_a_member_is_never_a_group(tmp_path: Path) -> None:
    """C16: one prompt, four members with ids of their own, rewards 1 0 0 1; then four records that each claim to be
    a whole group of one."""
    rig = TrainerRig(tmp_path, groups_per_step=1, versions=2).begin()
    request = rig.requests()[0]
    for index in range(4):
        rig.send(rig.rows(request, [1.0], group_size=1, claim=f"alone/{index}"))
    rig.step()
    before = rig.steps()
    rig.answer(0)
    rig.step()

    lone = [d for d in rig.decisions() if d.detail == "group_size 1, the run asks for 4"]
    assert before == []
    assert [d.reason for d in lone] == ["conflict"] * 4
    assert numbers(rig.decisions()) == [0.86588, -0.86588, -0.86588, 0.86588]


def test_c19_an_incomplete_group_is_dropped_at_its_deadline_and_its_late_member_is_refused(tmp_path: Path) -> None:
    """C19: rewards 1, 0, 0 arrive, the fourth never does; time-out 60 s; it comes at 90 s."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0).begin()
    rows = rig.rows(rig.requests()[0], [1, 0, 0, 1])
    rig.send(rows[:3])
    rig.wait(59)
    waiting = rig.told()
    rig.wait(2)
    rig.wait(2)
    dropped = rig.decisions()[:4]
    rig.clock.advance(27)
    late = rig.send(rows[3:])
    rig.wait(2)
    rig.wait(2)

    assert waiting == []
    assert [(d.decision, d.reason, d.detail) for d in dropped] == [
        ("dropped", "incomplete", "3/4 members after 60 s")
    ] * 4
    [refused] = [d for d in rig.decisions() if (d.partition, d.offset) == (late.partition, late.offset)]
    assert (refused.decision, refused.reason, refused.reward) == ("dropped", "group_closed", 1.0)
    assert [(r.group_id, r.attempt) for r in rig.requests()] == [("sim/p000000/e0/a0", 0), ("sim/p000000/e0/a1", 1)]
    assert rig.steps() == []


def test_c19_no_reward_is_invented_and_a_dropped_prompt_is_trained_at_its_next_attempt(tmp_path: Path) -> None:
    """C19: after the drop, the same prompt is answered in full."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, versions=1).begin()
    rig.send(rig.rows(rig.requests()[0], [1, 0, 0, 1])[:3])
    for _ in range(3):
        rig.wait(31)
    rig.answer(1)
    rig.step()

    assert trained(rig) == ["sim/p000000/e0/a1"]
    assert len(numbers(rig.decisions())) == 4


@pytest.mark.parametrize("interrupted", [False, True])
def test_c21_a_group_split_over_partitions_and_polls_is_normalised_as_one(tmp_path: Path, interrupted: bool) -> None:
    """C21: rewards 1 1 lie in partition 0, 0 0 of the same group in partition 1, read much later, also by a
    successor of the trainer that read the first half."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0).begin()
    rows = rig.rows(rig.requests()[0], [1, 1, 0, 0])
    rig.send(rows[:2], partition=0)
    rig.step()
    if interrupted:
        rig.restart()
    rig.wait(5)
    rig.send(rows[2:], partition=1)
    rig.step()

    assert numbers(rig.decisions()) == [0.86588, 0.86588, -0.86588, -0.86588]
    assert rig.committed() == {0: 1, 1: 1, 2: 0, 3: 0}


def test_c46_surplus_ready_groups_are_kept_for_the_next_batches_each_trained_once(tmp_path: Path) -> None:
    """C46: ten complete groups are there before the first batch of four: 4, 4, 2 and two more to fill the last."""
    rig = TrainerRig(tmp_path, groups_per_step=4, run_ahead=2, max_lag=2, versions=3)
    rig.step(4)
    rig.say("joined", ("g0", "i1"))
    rig.say("switched", "s0", 0, [("g0", "i1")])
    rig.proofs[0] = rig.say(
        "loaded", ("g0", "i1"), 0, "s0", manifest_sha256=rig.fold().versions[0].event.manifest_sha256
    )
    rig.answer(*range(10))
    rig.step(3)
    waiting = rig.steps()
    rig.say("activated", "s0", 0, [rig.proofs[0]])
    rig.step(8)
    two = [step.groups for step in rig.steps()]
    lowest = rig.committed()
    rig.answer(10, 11)
    rig.step(8)

    assert waiting == []
    assert two == [4, 4]
    assert [step.groups for step in rig.steps()] == [4, 4, 4]
    assert trained(rig) == ids(rig, *range(12))
    held = {
        (d.partition, d.offset) for d in rig.decisions() if d.group_id in ids(rig, 8, 9) and d.partition is not None
    }
    assert all(lowest[partition] <= offset for partition, offset in held if partition is not None)


def test_c48_a_stale_member_is_withheld_and_its_reward_stays_in_the_baseline(tmp_path: Path) -> None:
    """C48, documented rule: versions 5 5 5 1, rewards 1 0 0 1, trainer at version 6, limit 2."""
    rig = TrainerRig(tmp_path, groups_per_step=1, run_ahead=0, max_lag=2, versions=9).begin()
    for version in range(6):
        rig.answer(version, version=version)
        rig.step()
        rig.go_live(version + 1)
    request = rig.requests()[6]
    rig.proofs |= {6: rig.proofs[6]}
    rows = [
        rig.rows(request, [1, 0, 0, 1], version=version)[index] for index, version in enumerate([5, 5, 5, 1])
    ]  # fmt: skip
    rig.send(rows)
    rig.step()

    last = [d for d in rig.decisions() if d.group_id == request.group_id and d.subject is Subject.TRAJECTORY]
    assert numbers(last) == [0.86588, -0.86588, -0.86588]
    assert [(d.decision, d.reason, d.policy_lag, d.detail) for d in last][3] == ("dropped", "stale", 5, "lag 5 > 2")


def test_c50_the_groups_of_a_dead_worker_are_named_asked_for_again_and_trained(tmp_path: Path) -> None:
    """C50: three of eight groups were with a worker that died without a word; it comes back too late with one."""
    rig = TrainerRig(tmp_path, groups_per_step=8, run_ahead=0, versions=1).begin()
    rig.answer(0, 1, 2, 3, 4)
    rig.step()
    named = list(rig.trainer.waiting_for)
    for _ in range(3):
        rig.wait(31)
    again = [r.group_id for r in rig.requests()[8:]]
    rig.send(rig.rows(rig.requests()[5], [1, 0, 0, 1], key=G1))
    rig.answer(8, 9, 10)
    rig.wait(2)

    assert named == ids(rig, 5, 6, 7)
    assert rig.told()[:3] == [(name, "dropped", "lost") for name in named]
    assert again == [name.replace("/a0", "/a1") for name in named]
    assert [step.groups for step in rig.steps()] == [8]
    assert [d.reason for d in rig.decisions() if d.trajectory_id and d.trajectory_id.startswith(named[0])] == [
        "group_closed"
    ] * 4


def test_c50_requests_of_a_step_are_spread_over_all_partitions(tmp_path: Path) -> None:
    """C50 from the other side: what one worker holds is a part of the step, not all of it."""
    rig = TrainerRig(tmp_path, groups_per_step=8, run_ahead=1, versions=2).begin()

    assert [r.partition for r in rig.records(TopicName.PROMPTS)] == list(range(16))
