"""Notices, runs that are still under way, and records that stand where none may stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.ports import Message
from schemas import policy_events as ev
from schemas.headers import DEAD_OFFSET
from schemas.ids import GroupKey
from schemas.ledger import LedgerEnded, PartitionProgress, Settled, StepCompleted, Subject
from schemas.prompt_codec import encode_request, request_headers
from schemas.topics import TopicName, topic
from schemas.trajectory import PromptRequest
from tests.fakes.scored_run import ScoredRun
from tests.fakes.tiny_forge import Forge, errors_of, notices_of, remove_step
from tests.fakes.tiny_run import INCARNATION
from tests.fakes.tiny_values import RUN, request

FIRST = "tiny/p000000/e0/a0"


def test_rows_behind_the_end_of_the_run_are_a_notice(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    run.append_group(run.rows(FIRST, "g0", 3))

    report = run.audit()

    assert (report.errors, notices_of(report)) == (0, {"G1.after_end"})
    assert report.counts["rows_after_end"] == 2


def test_a_run_under_way_has_open_groups_and_rows_asnotices_of(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    run.append_group(run.rows("tiny/p000005/e0/a0", "g0", 3))

    report = run.audit()

    assert (report.errors, notices_of(report)) == (0, {"G1.open"})
    assert not report.ended


def test_a_group_that_is_neither_decided_nor_open_is_an_error_in_a_run_under_way(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    Forge(run).edit_decisions(1, lambda rows: [r for r in rows if (r.subject, r.group_id) != (Subject.GROUP, FIRST)])

    assert "it was lost" in errors_of(run.audit())["G1.group_undecided"]


def test_what_lies_beyond_the_ledger_of_a_run_under_way_is_a_notice(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, versions=2, end=False)
    remove_step(Forge(run), 2)
    report = run.audit()

    beyond = [f.message for f in report.findings if f.check == "G5.beyond_ledger"]
    assert any("published by a transaction" in message for message in beyond)
    assert any("requests of a transaction" in message for message in beyond)


def test_void_events_unreadable_events_and_weak_proofs_are_notices_with_counts(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    run.append_event(ev.WorkerAdmitted(run=RUN, at_us=1, worker="g9", incarnation="i1", version=0, ack=0))
    proof = Forge(run).policy_records(ev.VersionLoaded)[0]
    Forge(run).edit_event(ev.VersionLoaded, 0, probe_diff_old=None)
    run.log.append(Message(topic=topic(RUN, TopicName.POLICY), key=b"x", value=b"no event"))

    report = run.audit()

    assert report.errors == 0
    assert notices_of(report) == {"G1.open", "G4.void_events", "G4.unreadable_events", "G4.weak_proofs"}
    assert f"policy@{proof.offset}" in report.text()


@pytest.mark.parametrize("diff_old", [None, 0.0, 1e-4])
def test_a_probe_that_could_not_tell_new_weights_from_old_is_a_notice(tmp_path: Path, diff_old: float | None) -> None:
    """Version 0, a branch start, a tiny learning rate: up to the tolerance nothing was told apart."""
    run = ScoredRun(tmp_path)
    Forge(run).edit_event(ev.VersionLoaded, 1, probe_diff_old=diff_old, probe_tolerance=1e-4)

    assert (run.audit().errors, notices_of(run.audit())) == (0, {"G4.weak_proofs"})


def test_a_probe_that_could_tell_them_apart_is_no_notice(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    Forge(run).edit_event(ev.VersionLoaded, 1, probe_diff_old=1.1e-4, probe_tolerance=1e-4)

    assert (run.audit().errors, notices_of(run.audit())) == (0, set())


def test_directories_that_no_event_names_are_a_notice(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    (tmp_path / "tiny" / "zombie").mkdir()
    (tmp_path / "tiny" / "zombie" / "manifest.json").write_text("{}")

    report = run.audit()

    assert (report.errors, notices_of(report)) == (0, {"store.unnamed"})


def test_a_retired_version_may_be_gone(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    run.append_event(ev.VersionRetired(run=RUN, at_us=1, version=1, rule="keep=2"))
    run.store.delete("tiny/a001/manifest.json")

    assert run.audit().errors == 0


def test_a_version_that_is_gone_without_being_retired_is_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    run.store.delete("tiny/a001/manifest.json")

    assert "version 1: tiny/a001" in errors_of(run.audit())["store.checkpoint"]


def test_a_refused_record_that_decodes_here_is_a_notice(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    poison = next(r for r in run.records(TopicName.TRAJECTORIES) if r.key == b"poison")
    good = next(r for r in run.records(TopicName.TRAJECTORIES) if r.key != b"poison")
    Forge(run).rewrite(poison, value=good.value, headers=good.headers)
    assert "G1.dead_letter" in errors_of(run.audit())

    Forge(run).rewrite(run.records(TopicName.DEADLETTERS)[0], value=good.value)

    report = run.audit()
    assert (report.errors, notices_of(report)) == (0, {"G1.refused_but_decodes"})


def test_a_step_under_a_configuration_that_no_segment_names_is_a_notice(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    Forge(run).edit_control(StepCompleted, 0, config_digest="other")

    assert notices_of(run.audit()) == {"G5.config"}


def test_an_old_incarnations_ack_changes_nothing(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    run.append_event(ev.WorkerJoined(run=RUN, at_us=1, worker="g0", incarnation="i2", engine="hf", dtype="float32"))
    run.append_event(ev.WorkerLeft(run=RUN, at_us=1, worker="g0", incarnation=INCARNATION, reason="late"))

    report = run.audit()

    assert (report.errors, notices_of(report)) == (0, {"G1.open", "G4.void_events"})


def test_training_in_a_transaction_that_makes_no_version_is_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    controls = [t.control for t in run.run_log().transactions()]
    step = next(c for c in controls if isinstance(c, StepCompleted))
    settled = Settled(
        run=RUN, at_us=step.at_us, position=step.position, policy_read_up_to=step.policy_read_up_to, reason="x"
    )
    Forge(run).replace_control(StepCompleted, 0, settled)

    assert "which makes no version" in errors_of(run.audit())["G5.step_counts"]


# ---------------------------------------------------------------------- records too many


@pytest.mark.parametrize(
    ("position", "partition", "words"),
    [
        (0, 0, "position 0 is also that of"),
        (30, 3, "position 30 lies in partition 3, not 14"),
        (30, 14, "position 30 is behind the last one, 8"),
    ],
)
def test_a_request_where_none_may_be_is_found(tmp_path: Path, position: int, partition: int, words: str) -> None:
    run = ScoredRun(tmp_path)
    asked = request(GroupKey(run=RUN, prompt=50, epoch=0, attempt=0), position, 0, 0, 1)
    _append_request(run, asked, partition)

    assert words in errors_of(run.audit())["G1.request_record"]


def test_a_group_requested_twice_is_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    _append_request(run, request(GroupKey(run=RUN, prompt=0, epoch=0, attempt=0), 0, 0, 0, 1), 0)

    assert "1 group ids were requested twice" in errors_of(run.audit())["G1.request_record"]


def test_a_group_left_open_and_a_record_left_undecided_at_the_end_are_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    position = next(t.control for t in run.run_log().transactions() if t.control is not None).position
    partitions = {0: PartitionProgress(next_offset=1, undecided=(0,))}
    Forge(run).edit_control(LedgerEnded, 0, position=position.model_copy(update={"partitions": partitions}))

    found = errors_of(run.audit())["G5.run_end"]

    assert "tiny/p000000/e0/a0: still open at the end" in found
    assert "trajectories[0]@0: undecided at the end" in found


def test_a_dead_letter_without_a_decision_is_an_error_only_once_the_run_has_ended(tmp_path: Path) -> None:
    for end in (True, False):
        run = ScoredRun(tmp_path / str(end), end=end)
        letter = run.records(TopicName.DEADLETTERS)[0]
        headers = tuple((k, b"70" if k == DEAD_OFFSET else v) for k, v in letter.headers)
        run.log.append(Message(topic=letter.topic, key=b"x", value=letter.value, headers=headers))

        report = run.audit()

        assert ("G1.dead_letter" in errors_of(report)) is end
        assert ("G5.beyond_ledger" in notices_of(report)) is not end


def test_two_versions_must_not_share_a_directory(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    Forge(run).edit_event(ev.VersionPublished, 2, manifest_uri="tiny/a001/manifest.json")

    assert "names the directory of version 1" in errors_of(run.audit())["store.manifest"]


def test_an_address_outside_the_store_is_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    Forge(run).edit_event(ev.VersionPublished, 2, manifest_uri="../../etc/manifest.json")

    assert "version 2" in errors_of(run.audit())["store.manifest"]


def test_a_branch_start_needs_no_step(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path, end=False)
    published = [e.event for e in run.run_log().policy() if isinstance(e.event, ev.VersionPublished)]
    run.append_event(ev.BranchStarted(run=RUN, at_us=1, from_version=1))
    run.append_event(published[1].model_copy(update={"version": 4, "parent": 1}))

    report = run.audit()

    assert (report.errors, notices_of(report)) == (0, {"G1.open"})


def _append_request(run: ScoredRun, asked: PromptRequest, partition: int) -> None:
    value = encode_request(asked)
    headers = request_headers(asked, value, "forger")
    name = topic(RUN, TopicName.PROMPTS)
    run.log.append(Message(topic=name, key=asked.group_id.encode(), value=value, headers=headers, partition=partition))
