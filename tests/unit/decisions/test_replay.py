"""Replay: trained groups used again while fresh, with the advantages and log-probabilities of their first use."""

from __future__ import annotations

from consumers.trainer.admission import AdmissionRules
from consumers.trainer.replay import ReplayBuffer, ReplayRules
from schemas.policy_fold import PolicyFold
from schemas.trajectory import DecodedRow
from tests.fakes.log_script import G0, TOKENIZER, decoded, group, running

A, B = "demo/p000000/e0/a0", "demo/p000001/e0/a0"
ADMISSION = AdmissionRules(max_lag=2, barrier=True, tokenizer_digest=TOKENIZER)


def trained(
    buffer: ReplayBuffer, group_id: str, proof: int, *, version: int = 0, depth: int = 0, offset: int = 4
) -> None:
    rows = decoded(group(group_id, [1.0, 0.0], group_size=2, segments=((version, 2, proof),)))
    buffer.add(
        group_id, depth, [((1, offset), row, advantage) for row, advantage in zip(rows, (0.5, -0.5), strict=True)]
    )


def fold(versions: int = 3) -> tuple[PolicyFold, dict[int, int]]:
    script, proofs = running(G0, versions=versions)
    return script.fold, {version: proofs[G0, version] for version in range(versions)}


def test_a_group_is_used_again_with_the_advantages_of_its_first_use() -> None:
    policy, proofs = fold()
    buffer = ReplayBuffer(ReplayRules(steps=2, groups_per_step=1, max_use=3), ())
    trained(buffer, A, proofs[0])
    (chosen,) = buffer.choose(policy, 1, ADMISSION)

    assert (chosen.group_id, chosen.use_count) == (A, 2)
    assert [(row.advantage, row.policy_lag, row.key) for row in chosen.rows] == [(0.5, 1, (1, 4)), (-0.5, 1, (1, 4))]


def test_uses_are_bounded_and_a_used_up_group_is_forgotten() -> None:
    policy, proofs = fold()
    buffer = ReplayBuffer(ReplayRules(steps=9, groups_per_step=1, max_use=2), ())
    trained(buffer, A, proofs[0])
    buffer.used(buffer.choose(policy, 1, ADMISSION))

    assert buffer.choose(policy, 1, ADMISSION) == []
    buffer.expire(depth=1)
    assert buffer.snapshot() == ()


def test_a_group_too_old_for_the_lag_limit_is_not_replayed() -> None:
    policy, proofs = fold(versions=4)
    buffer = ReplayBuffer(ReplayRules(steps=9, groups_per_step=1), ())
    trained(buffer, A, proofs[0])

    assert len(buffer.choose(policy, 2, ADMISSION)) == 1
    assert buffer.choose(policy, 3, ADMISSION) == []


def test_the_least_used_group_goes_first_then_the_newest() -> None:
    policy, proofs = fold()
    buffer = ReplayBuffer(ReplayRules(steps=9, groups_per_step=1, max_use=9), ())
    trained(buffer, A, proofs[0], depth=0)
    trained(buffer, B, proofs[1], version=1, depth=1)
    first = buffer.choose(policy, 2, ADMISSION)
    buffer.used(first)
    second = buffer.choose(policy, 2, ADMISSION)

    assert [chosen.group_id for chosen in (*first, *second)] == [B, A]


def test_groups_leave_after_the_configured_number_of_steps() -> None:
    _, proofs = fold()
    buffer = ReplayBuffer(ReplayRules(steps=2, groups_per_step=1), ())
    trained(buffer, A, proofs[0], depth=5)
    buffer.expire(depth=6)
    kept = len(buffer.snapshot())
    buffer.expire(depth=7)

    assert (kept, len(buffer.snapshot())) == (1, 0)


def test_after_a_restart_nothing_is_chosen_before_the_records_were_read_again() -> None:
    policy, proofs = fold()
    rules = ReplayRules(steps=2, groups_per_step=1)
    before = ReplayBuffer(rules, ())
    trained(before, A, proofs[0])
    after = ReplayBuffer(rules, before.snapshot())
    missing, nothing = after.missing(), after.choose(policy, 1, ADMISSION)
    rows: tuple[DecodedRow, ...] = decoded(group(A, [1.0, 0.0], group_size=2, segments=((0, 2, proofs[0]),)))
    after.restore((1, 4), rows)

    assert (missing, nothing) == ({(1, 4)}, [])
    assert after.missing() == set()
    (again,), (first,) = after.choose(policy, 1, ADMISSION), before.choose(policy, 1, ADMISSION)
    assert [(r.row.row_sha256, r.advantage) for r in again.rows] == [
        (r.row.row_sha256, r.advantage) for r in first.rows
    ]


def test_with_replay_off_nothing_is_remembered() -> None:
    _, proofs = fold()
    buffer = ReplayBuffer(ReplayRules(), ())
    trained(buffer, A, proofs[0])

    assert buffer.snapshot() == ()
