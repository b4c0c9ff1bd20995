"""May this row enter the update? The table of lags, proofs and supports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from consumers.trainer.admission import Admission, AdmissionRules, Verdict, judge, trained_versions, verdict_key
from schemas.ledger import Reason
from schemas.policy_fold import PolicyFold
from schemas.trajectory import Sampling, Trajectory
from tests.fakes.log_script import G0, G1, TOKENIZER, running, trajectory

RULES = AdmissionRules(max_lag=2, barrier=True, tokenizer_digest=TOKENIZER)
UNLIMITED = replace(RULES, max_lag=10**9)


def at_version_5() -> tuple[PolicyFold, dict[int, int]]:
    """Versions 0-5 went live with g0; proof offset by version."""
    script, proofs = running(G0, versions=6)
    return script.fold, {version: offset for (_, version), offset in proofs.items()}


def outcome(verdict: Verdict) -> tuple[str, str, int | None]:
    return verdict.admission.value, verdict.reason.value, verdict.policy_lag


@pytest.mark.parametrize(
    ("rules", "version", "expected"),
    [
        (RULES, 6, ("wait", "", None)),
        (RULES, 5, ("admit", "", 0)),
        (RULES, 4, ("admit", "", 1)),
        (RULES, 3, ("admit", "", 2)),
        (RULES, 2, ("refuse", "stale", 3)),
        (replace(RULES, max_lag=0), 5, ("admit", "", 0)),
        (replace(RULES, max_lag=0), 4, ("refuse", "stale", 1)),
        (UNLIMITED, 2, ("admit", "", 3)),
        (UNLIMITED, 0, ("admit", "", 5)),
        (UNLIMITED, 6, ("wait", "", None)),
    ],
)
def test_lag_is_admitted_up_to_the_limit_and_the_future_never(
    rules: AdmissionRules, version: int, expected: tuple[str, str, int | None]
) -> None:
    """C42: trainer at version 5, limit 2, then 0, then none."""
    fold, proofs = at_version_5()

    row = trajectory(segments=[(version, 2, proofs.get(version, 10**6))])

    assert outcome(judge(row, fold, 5, rules)) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [(5, ("admit", "", 1)), (4, ("admit", "", 2)), (3, ("refuse", "stale", 3)), (6, ("wait", "", None))],
)
def test_a_step_that_is_trained_and_not_committed_yet_counts(
    version: int, expected: tuple[str, str, int | None]
) -> None:
    fold, proofs = at_version_5()

    row = trajectory(segments=[(version, 2, proofs.get(version, 10**6))])

    assert outcome(judge(row, fold, 5, RULES, ahead=1)) == expected


def test_the_reason_names_the_lag_and_the_limit() -> None:
    fold, proofs = at_version_5()

    assert judge(trajectory(segments=[(2, 1, proofs[2])]), fold, 5, RULES).detail == "lag 3 > 2"


def test_the_oldest_trained_token_decides() -> None:
    fold, proofs = at_version_5()
    row = trajectory(segments=[(5, 1, proofs[5]), (3, 1, proofs[3]), (4, 2, proofs[4])])

    assert outcome(judge(row, fold, 5, RULES)) == ("admit", "", 2)


def test_tokens_that_the_policy_did_not_sample_do_not_count_for_lag_or_proof() -> None:
    """Tool output lies in a segment of version 0, which is far too old and has no proof."""
    fold, proofs = at_version_5()
    mask = np.array([True, False, False, True])
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    segments = [(4, 1, proofs[4]), (0, 2, 10**6), (5, 1, proofs[5])]
    row = trajectory(segments=segments, loss_mask=mask, logprobs=logprobs)

    assert trained_versions(row) == [(4, proofs[4]), (5, proofs[5])]
    assert outcome(judge(row, fold, 5, RULES)) == ("admit", "", 1)


def test_a_row_without_any_trained_token_can_not_be_stale() -> None:
    fold, _ = at_version_5()
    row = trajectory(
        segments=[(0, 2, 10**6)], loss_mask=np.zeros(2, dtype=np.bool_), logprobs=np.zeros(2, dtype=np.float32)
    )

    assert outcome(judge(row, fold, 5, RULES)) == ("admit", "", 0)


def test_a_version_of_another_branch_is_never_fresh() -> None:
    script, proofs = running(G0, versions=4)
    script.branched(1)
    script.published(4, parent=1, depth=1)

    verdicts = [judge(trajectory(segments=[(v, 2, proofs[G0, v])]), script.fold, 4, UNLIMITED) for v in (3, 2, 1, 0)]

    assert [v.reason for v in verdicts] == [Reason.OTHER_BRANCH, Reason.OTHER_BRANCH, Reason.NONE, Reason.NONE]
    assert [v.policy_lag for v in verdicts] == [None, None, 0, 1]


@pytest.mark.parametrize("what", ["worker", "incarnation", "version", "no ack"])
def test_a_proof_of_somebody_or_something_else_is_no_proof(what: str) -> None:
    script, proofs = running(G0, G1, versions=2)
    changes = {
        "worker": {"segments": [(1, 2, proofs[G1, 1])]},
        "incarnation": {"segments": [(1, 2, proofs[G0, 1])], "key": ("g0", "i0")},
        "version": {"segments": [(1, 2, proofs[G0, 0])]},
        "no ack": {"segments": [(1, 2, 0)]},
    }[what]

    verdict = judge(trajectory(**changes), script.fold, 1, RULES)

    assert (verdict.admission, verdict.reason) == (Admission.REFUSE, Reason.UNPROVEN)
    assert "is no proof of version 1 by g0" in verdict.detail


def test_every_trained_segment_needs_its_own_proof() -> None:
    fold, proofs = at_version_5()
    row = trajectory(segments=[(5, 1, proofs[5]), (4, 1, proofs[5])])

    assert judge(row, fold, 5, RULES).reason is Reason.UNPROVEN


def test_a_proof_that_is_not_read_yet_is_waited_for() -> None:
    fold, _ = at_version_5()
    row = trajectory(segments=[(5, 2, fold.read_up_to)])

    assert judge(row, fold, 5, RULES).admission is Admission.WAIT


def test_a_barrier_waits_for_the_activation_and_rolling_does_not() -> None:
    script, _ = running(G0)
    script.published(1)
    script.switched("s1", 1, [G0])
    script.loaded(G0, 1, "s1")
    row = trajectory(segments=[(1, 2, script.last)])
    before = [judge(row, script.fold, 1, rules).admission for rules in (RULES, replace(RULES, barrier=False))]
    script.activated("s1", 1, [script.last])

    assert before == [Admission.WAIT, Admission.ADMIT]
    assert judge(row, script.fold, 1, RULES).admission is Admission.ADMIT


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(top_p=0.9), "top_p=0.9"),
        (Sampling(top_k=5), "top_k=5"),
        (Sampling(min_p=0.1), "min_p=0.1"),
        (Sampling(presence_penalty=1.0), "presence_penalty=1.0"),
        (Sampling(frequency_penalty=1.0), "frequency_penalty=1.0"),
        (Sampling(repetition_penalty=1.1), "repetition_penalty=1.1"),
        (Sampling(logit_bias=((3, 1.0),)), "logit_bias"),
        (Sampling(min_tokens=2), "min_tokens=2"),
        (Sampling(logprobs_mode="raw"), "logprobs_mode=raw"),
        (Sampling(temperature=0.0), "greedy"),
    ],
)
def test_a_distribution_the_trainer_does_not_model_is_refused_by_name(sampling: Sampling, words: str) -> None:
    fold, proofs = at_version_5()

    verdict = judge(trajectory(segments=[(5, 2, proofs[5])], sampling=sampling), fold, 5, RULES)

    assert (verdict.admission, verdict.reason) == (Admission.REFUSE, Reason.SUPPORT_MISMATCH)
    assert words in verdict.detail


def test_temperature_and_what_ends_a_completion_do_not_change_the_support() -> None:
    fold, proofs = at_version_5()
    sampling = Sampling(temperature=0.5, max_tokens=3, stop_token_ids=(2,), seed=9)

    assert judge(trajectory(segments=[(5, 2, proofs[5])], sampling=sampling), fold, 5, RULES).reason is Reason.NONE


def test_another_tokenizer_is_refused_by_name() -> None:
    fold, proofs = at_version_5()
    rules = replace(RULES, tokenizer_digest="0123456789abcdef")

    verdict = judge(trajectory(segments=[(5, 2, proofs[5])]), fold, 5, rules)

    assert verdict.reason is Reason.SUPPORT_MISMATCH
    assert verdict.detail == "tokenizer tokenizer-di is not the trainer's 0123456789ab"


class Watched:
    """A row that remembers what was asked of it."""

    def __init__(self, row: Trajectory) -> None:
        self.row = row
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self.row, name)


@pytest.mark.parametrize("proven", [True, False])
def test_rows_share_a_verdict_only_when_all_that_judge_looks_at_is_equal(proven: bool) -> None:
    fold, proofs = at_version_5()
    row = trajectory(segments=[(5, 2, proofs[5] if proven else proofs[4])])
    by_judge, by_key = Watched(row), Watched(row)
    judge(by_judge, fold, 5, replace(RULES, takes_other_numbers=False))  # type: ignore[arg-type]
    key = verdict_key(by_key)  # type: ignore[arg-type]

    assert by_judge.asked == by_key.asked
    other_mask = {"loss_mask": np.array([False, False]), "logprobs": np.zeros(2, dtype=np.float32)}
    changes: list[dict[str, Any]] = [
        {"sampling": replace(row.sampling, seed=7)}, {"fingerprint": replace(row.fingerprint, dtype="bfloat16")},
        {"worker_id": "g9"}, {"incarnation": "i9"}, {"segments": (replace(row.segments[0], version=4),)},
        {"segments": (replace(row.segments[0], proof=1),)}, other_mask,
    ]  # fmt: skip
    assert len({key, *(verdict_key(replace(row, **change)) for change in changes)}) == 1 + len(changes)
    assert verdict_key(replace(row, reward=0.25, finish_reason="length")) == key
