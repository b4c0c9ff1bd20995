"""Each check of the audit, tripped by changing one thing in a run that was correct."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from consumers.offline.audit import CHECKS, AuditRules, audit
from consumers.offline.audit.checks import family
from consumers.offline.audit.policy import check_activations
from consumers.offline.audit.report import Findings
from consumers.offline.run_log import PolicyEntry
from schemas import policy_events as ev
from schemas.headers import is_arrow
from schemas.ledger import Decision, DecisionRow, LedgerEnded, StepCompleted, Subject
from schemas.policy_fold import PolicyFold
from schemas.topics import TopicName
from schemas.trajectory import Segment
from tests.fakes.scored_run import ScoredRun
from tests.fakes.tiny_export import PROXIMAL, append_scores
from tests.fakes.tiny_forge import Forge, errors_of, remove_step
from tests.fakes.tiny_run import RULES
from tests.fakes.tiny_values import RUN

FIRST = "tiny/p000000/e0/a0"
SECOND = "tiny/p000002/e0/a0"
Change = Callable[[Forge], object]


def _without(predicate: Callable[[DecisionRow], bool]) -> Callable[[list[DecisionRow]], list[DecisionRow]]:
    return lambda rows: [row for row in rows if not predicate(row)]


def _flip(name: TopicName, number: int, at: int) -> Change:
    return lambda forge: forge.flip_byte(forge.records(name)[number], at)


def _remove(name: TopicName, number: int) -> Change:
    return lambda forge: forge.remove(forge.records(name)[number])


def _remove_event(kind: type[ev.PolicyEvent], number: int) -> Change:
    return lambda forge: forge.remove(forge.policy_records(kind)[number])


def _change_a_stamp(forge: Forge) -> None:
    record = forge.policy_records(ev.WorkerJoined)[0]
    assert record.value is not None
    forge.flip_byte(record, record.value.index(b'"at_us":') + len(b'"at_us":1'))


def _leave_one_out(forge: Forge) -> None:
    forge.edit_decisions(1, _without(lambda r: r.trajectory_id == f"{FIRST}/0"))


def _train_again(forge: Forge) -> None:
    first = next(row for _, row in forge.trained() if row.trajectory_id == f"{FIRST}/0")
    forge.edit_decisions(2, lambda rows: [*rows, first])


def _train_from_two_places(forge: Forge) -> None:
    """The duplicate claim's row is trained as well, in the step of the first."""

    def edit(rows: list[DecisionRow]) -> list[DecisionRow]:
        original = next(r for r in rows if r.decision is Decision.TRAINED and r.trajectory_id)
        twin = next(r for r in rows if r.trajectory_id == original.trajectory_id and r.reason == "duplicate")
        as_trained = dataclasses.replace(
            twin, decision=Decision.TRAINED, reason="", policy_lag=1, weight=1.0, use_count=1, advantage=0.5
        )
        return [as_trained if r is twin else r for r in rows]

    forge.edit_decisions(2, edit)


def _replay_out_of_nothing(forge: Forge) -> None:
    def edit(rows: list[DecisionRow]) -> list[DecisionRow]:
        return [
            dataclasses.replace(r, decision=Decision.REPLAYED, use_count=2) if r.trajectory_id == f"{FIRST}/0" else r
            for r in rows
        ]

    forge.edit_decisions(1, edit)


def _decide_in_a_later_step(forge: Forge) -> None:
    moved = next(row for _, row in forge.trained() if row.trajectory_id == f"{FIRST}/0")
    forge.edit_decisions(1, _without(lambda r: r.trajectory_id == f"{FIRST}/0"))
    forge.edit_decisions(2, lambda rows: [*rows, moved])


def _other_bytes_in_dead_letters(forge: Forge) -> None:
    forge.rewrite(forge.records(TopicName.DEADLETTERS)[0], value=b"other bytes")


def _future(forge: Forge) -> None:
    """A row of the first step that says it was sampled under a version nobody had then."""
    forge.edit_trajectory(f"{FIRST}/0", segments=(Segment(version=3, length=3, proof=6),))


def _damage_checkpoint(forge: Forge) -> None:
    path = forge.run.store_root / "tiny" / "a002" / "model.safetensors"
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))


def _score_again(forge: Forge) -> None:
    append_scores(forge.run, FIRST, [f"{FIRST}/0"], 0, PROXIMAL)


def _score_a_stranger(forge: Forge) -> None:
    append_scores(forge.run, "tiny/p000077/e0/a0", ["tiny/p000077/e0/a0/0"], 0, PROXIMAL)


def _score_too_few(forge: Forge) -> None:
    append_scores(forge.run, SECOND, [f"{SECOND}/0"], 0, PROXIMAL[:2])


def _announce_unissued(forge: Forge) -> None:
    def edit(rows: list[DecisionRow]) -> list[DecisionRow]:
        return [dataclasses.replace(r, group_id="tiny/p000099/e0/a0") if _is_first(r) else r for r in rows]

    forge.edit_decisions(1, edit)


def _is_first(row: DecisionRow) -> bool:
    return row.subject is Subject.GROUP and row.group_id == FIRST


CASES: tuple[tuple[str, Change, str], ...] = (
    ("G1.ledger_record", _flip(TopicName.LEDGER, 3, 700), "the record was altered"),
    ("G1.ledger_record", _flip(TopicName.LEDGER, 3, -40), "ledger@"),
    ("G1.ledger_record", _remove(TopicName.LEDGER, -1), "decisions without a control record"),
    ("G1.request_record", _remove(TopicName.PROMPTS, 0), "request 0: the ledger counts it as issued"),
    ("G1.request_record", _flip(TopicName.PROMPTS, 0, 3), "prompts[0]@0"),
    (
        "G1.group_undecided",
        lambda f: f.edit_decisions(1, _without(_is_first)),
        FIRST,
    ),
    ("G1.group_decided_twice", lambda f: f.edit_decisions(1, lambda rows: [*rows, rows[1]]), FIRST),
    ("G1.group_unknown", _announce_unissued, "tiny/p000099/e0/a0: decided (trained) but never issued"),
    (
        "G1.group_mismatch",
        lambda f: f.edit_decisions(1, _without(_is_first)),
        f"{FIRST}/0: trained, but its group",
    ),
    (
        "G1.group_mismatch",
        lambda f: f.edit_trajectory(f"{FIRST}/1", claim_id="g1/i1/0"),
        f"{FIRST}: trained members come from 2 claims",
    ),
    (
        "G1.trajectory_undecided",
        _leave_one_out,
        f"{FIRST}/0",
    ),
    ("G1.decided_twice", lambda f: f.edit_decisions(1, lambda rows: [*rows, rows[0]]), "2 decisions about this record"),
    ("G1.trained_twice", _train_again, f"{FIRST}/0"),
    ("G1.trained_twice", _train_from_two_places, "trained from"),
    ("G1.replay", _replay_out_of_nothing, f"{FIRST}/0: replayed without having been trained"),
    ("G1.decision_without_row", lambda f: f.edit_decision(f"{FIRST}/0", offset=77), "@77 is not in the log"),
    ("G1.decision_without_row", lambda f: f.edit_decision(f"{FIRST}/0", row=7), f"{FIRST}/0"),
    ("G1.record_split", _decide_in_a_later_step, "its rows are decided in transactions"),
    ("G1.row_altered", lambda f: f.edit_trajectory(f"{FIRST}/0", text="another answer"), f"{FIRST}/0"),
    ("G1.row_altered", lambda f: f.flip_byte(f.records(TopicName.TRAJECTORIES)[0], 3), "/e0/a"),
    ("G1.row_altered", lambda f: f.edit_decision(f"{FIRST}/0", row_sha256="ab" * 32), f"{FIRST}/0"),
    (
        "G1.decision_altered",
        lambda f: f.edit_decision(f"{FIRST}/0", reward=0.5),
        f"{FIRST}/0: transaction 2: reward is 0.5",
    ),
    ("G1.decision_altered", lambda f: f.edit_decision(f"{FIRST}/0", completion_tokens=4), "completion_tokens is 4"),
    ("G1.decision_altered", lambda f: f.edit_decision(f"{FIRST}/0", group_id=SECOND), "group_id is"),
    ("G1.decision_altered", lambda f: f.edit_decision(f"{FIRST}/0", weight=0.5), "weight 0.5 at lag 0, expected 1.0"),
    ("G1.decision_altered", lambda f: f.edit_decision(f"{FIRST}/0", use_count=2), "trained as use 2"),
    ("G1.decision_altered", lambda f: f.edit_decision(f"{FIRST}/0", advantage=None), "trained without"),
    ("G1.advantage", lambda f: f.edit_decision(f"{FIRST}/0", advantage=0.75), f"{FIRST}/0: the ledger says 0.75"),
    (
        "G1.record_undecided",
        lambda f: f.edit_decisions(1, _without(lambda r: r.subject is Subject.RECORD)),
        "cannot be decoded",
    ),
    ("G1.dead_letter", _remove(TopicName.DEADLETTERS, 0), "refused, but not in deadletters"),
    ("G1.dead_letter", _other_bytes_in_dead_letters, "holds other bytes"),
    ("G2.lag_differs", lambda f: f.edit_decision(f"{FIRST}/0", policy_lag=1), "says lag 1, the parent chain 0"),
    ("G2.not_an_ancestor", _future, f"{FIRST}/0: sampled under version 3"),
    ("G3.proof", lambda f: f.edit_trajectory(f"{FIRST}/0", worker_id="g1"), f"{FIRST}/0"),
    ("G3.proof", _remove_event(ev.VersionLoaded, 0), "is no legal VersionLoaded"),
    ("G3.proof", lambda f: f.edit_control(StepCompleted, 0, policy_read_up_to=6), "was not read"),
    ("G3.not_activated", _remove_event(ev.VersionActivated, 0), "sampled under version 0, activated never"),
    ("G3.not_activated", lambda f: f.edit_event(ev.VersionActivated, 0, acks=()), "activated never"),
    (
        "G4.trainer_event_void",
        lambda f: f.edit_event(ev.VersionPublished, 2, version=7) and None,
        "VersionPublished is void",
    ),
    (
        "G4.other_bytes",
        lambda f: f.edit_event(ev.VersionLoaded, 2, manifest_sha256="ab" * 32) and None,
        "version 1: g0/i1 proved manifest abababababab... at policy@",
    ),
    ("G4.policy_record", _change_a_stamp, "policy@3: WorkerJoined"),
    ("G5.step_without_version", _remove_event(ev.VersionPublished, 3), "version 3: transaction"),
    ("G5.version_without_step", lambda f: remove_step(f, 2), "version 2: published, but no StepCompleted"),
    ("G5.step_order", lambda f: f.edit_control(StepCompleted, 1, version_in=0), "version 2: trained from version 0"),
    ("G5.step_order", lambda f: f.edit_control(StepCompleted, 2, policy_read_up_to=9), "an earlier step"),
    ("G5.step_counts", lambda f: f.edit_control(StepCompleted, 0, trajectories=5), "version 1: says 5 trajectories"),
    ("G5.step_counts", lambda f: f.edit_control(StepCompleted, 0, groups=3), "version 1: says 3 groups"),
    ("G5.batch_digest", lambda f: f.edit_control(StepCompleted, 0, batch_digest="cd" * 32), "version 1: batch digest"),
    ("G5.batch_digest", lambda f: f.edit_decisions(1, lambda rows: rows[::-1]), "version 1: batch digest"),
    ("G5.scores", _flip(TopicName.SCORES, 0, -40), "scores[0]@0: "),
    ("G5.scores", _remove(TopicName.SCORES, 0), "/0: trained into version 2, and not scored"),
    ("G5.scores", _score_again, f"{FIRST}/0: scored twice in the step of version 1"),
    ("G5.scores", _score_a_stranger, "tiny/p000077/e0/a0/0: scored at scores["),
    ("G5.scores", _score_too_few, f"{SECOND}/0: 2 scores at scores["),
    ("G5.position", lambda f: _edit_position(f, next_request=3), "next_request goes back"),
    ("G5.position", lambda f: _edit_position(f, open_groups=()), "left the open set without a decision"),
    ("G5.position", lambda f: _edit_position(f, prompt_cursor=0), "prompt_cursor goes from"),
    ("G5.run_end", _remove_event(ev.RunEnded, 0), "the ledger has RunEnded, policy has not"),
    ("G5.run_end", lambda f: f.edit_control(LedgerEnded, 0, last_version=9), "ends with version 9"),
    ("store.checkpoint", _damage_checkpoint, "version 2: tiny/a002/model.safetensors has sha256"),
    (
        "store.manifest",
        lambda f: f.edit_event(ev.VersionPublished, 1, bytes=1) and None,
        "version 1: the event says 1 bytes",
    ),
)


def _edit_position(forge: Forge, **changes: object) -> None:
    """Of the control record of version 2."""
    controls = [t.control for t in forge.run.run_log().transactions()]
    step = next(c for c in controls if isinstance(c, StepCompleted) and c.version_out == 2)
    forge.edit_control(StepCompleted, 1, position=step.position.model_copy(update=changes))


def test_a_correct_run_has_no_finding_and_every_check_is_made(tmp_path: Path) -> None:
    report = ScoredRun(tmp_path).audit()

    assert (report.findings, report.errors, report.notices) == ((), 0, 0)
    assert set(report.checks) == {check for check in CHECKS if family(check) not in ("recompute", "mlflow")}
    assert report.counts["rows_trained"] == 12
    assert report.counts["advantages_recomputed"] == 12


@pytest.mark.parametrize(("check", "change", "words"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)])
def test_one_change_is_found_and_named(tmp_path: Path, check: str, change: Change, words: str) -> None:
    run = ScoredRun(tmp_path)

    change(Forge(run))

    errors = errors_of(run.audit())
    assert words in errors[check]


def test_a_lag_above_the_limit_is_found(tmp_path: Path) -> None:
    errors = errors_of(ScoredRun(tmp_path).audit(AuditRules(max_lag=0)))

    assert "with lag 1 > 0" in errors["G2.lag_above_limit"]


def test_something_dropped_as_stale_inside_the_limit_is_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    Forge(run).edit_decisions(
        2,
        lambda rows: [
            dataclasses.replace(r, reason="stale", policy_lag=1) if r.reason == "duplicate" else r for r in rows
        ],
    )

    assert "with lag 1" in errors_of(run.audit())["G2.stale_but_fresh"]


def test_a_step_whose_configuration_was_not_stored_is_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)

    report = audit(run.run_log(), {"another": RULES}, run.store)

    assert set(errors_of(report)) == {"G2.limits_unknown"}


def test_limits_come_from_the_configuration_of_the_step(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)

    report = audit(run.run_log(), {"c0nf19": AuditRules(max_lag=0)}, run.store)

    assert set(errors_of(report)) == {"G2.lag_above_limit"}


def test_an_invalid_row_that_was_trained_is_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    log = run.run_log()
    log.limits = dataclasses.replace(log.limits, vocabulary_size=5)

    assert "token" in errors_of(audit(log, RULES))["G1.trained_invalid"]


def test_every_byte_of_a_decisions_record_is_guarded(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    record = next(r for r in run.records(TopicName.LEDGER) if is_arrow(r.headers))
    assert record.value is not None

    for at in range(0, len(record.value), 97):
        Forge(run).flip_byte(record, at)
        assert "G1.ledger_record" in errors_of(run.audit()), at
        Forge(run).rewrite(record)


def test_an_activation_without_proof_is_found_even_where_a_fold_let_it_pass() -> None:
    activated = ev.VersionActivated(run=RUN, at_us=1, switch="s", version=0, acks=())
    on_nothing = ev.VersionActivated(run=RUN, at_us=1, switch="s", version=0, acks=(3,))
    findings = Findings()

    check_activations(
        [PolicyEntry(offset=n, event=event, void=None) for n, event in enumerate((activated, on_nothing))],
        PolicyFold(),
        findings,
    )

    assert [f.message for f in findings.kept] == [
        "activated at policy@0 on no ack at all",
        "activated at policy@1: policy@3 is no legal VersionLoaded before it",
    ]


def test_replays_inside_max_use_are_in_order_and_above_it_are_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    _replay_in_second_step(Forge(run))

    allowed = errors_of(run.audit(dataclasses.replace(RULES, max_use=2)))

    assert "1 replays, at most 0" in errors_of(run.audit())["G1.replay"]
    assert set(allowed) == {"G5.step_counts", "G5.batch_digest"}


def test_a_replay_with_another_advantage_is_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    _replay_in_second_step(Forge(run), advantage=2.0)

    errors = errors_of(run.audit(dataclasses.replace(RULES, max_use=2)))

    assert "another advantage" in errors["G1.replay"]


def _replay_in_second_step(forge: Forge, **changes: object) -> None:
    first = next(row for _, row in forge.trained() if row.trajectory_id == f"{FIRST}/0")
    fields = {"decision": Decision.REPLAYED, "use_count": 2, "policy_lag": 1, **changes}
    replayed = dataclasses.replace(first, **fields)  # type: ignore[arg-type]
    forge.edit_decisions(2, lambda rows: [*rows, replayed])


def test_every_check_is_tripped_by_some_test() -> None:
    elsewhere = {
        "G1.after_end", "G1.open", "G1.refused_but_decodes", "G1.trained_invalid", "G2.lag_above_limit",
        "G2.limits_unknown", "G2.stale_but_fresh", "G4.live_without_proof", "G4.void_events", "G4.unreadable_events",
        "G4.weak_proofs", "G5.beyond_ledger", "G5.config", "G6.replayable", "store.unnamed", "log.gap", "log.truncated",
        "recompute.behaviour", "recompute.scores", "mlflow.mirror",
    }  # fmt: skip

    assert {check for check, _, _ in CASES} | elsewhere == set(CHECKS)
