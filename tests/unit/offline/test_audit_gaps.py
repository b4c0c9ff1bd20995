"""What an audit cannot see is one message, or, where it is accepted, a record in the report beside the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.offline.audit import AuditReport
from schemas.errors import IllegalState, RangeMissing
from schemas.topics import TopicName, topic
from tests.fakes.scored_run import ScoredRun
from tests.fakes.tiny_forge import Forge, errors_of, notices_of
from tests.fakes.tiny_values import RUN

LOSSES = [
    (TopicName.TRAJECTORIES, 2, "decisions about rows"),
    (TopicName.PROMPTS, 3, "groups without a request"),
    (TopicName.SCORES, 0, "scores"),
    (TopicName.DEADLETTERS, 0, "dead letters"),
]


def lose(run: ScoredRun, name: TopicName, partition: int, count: int = 1) -> None:
    """Retention removes the first records."""
    run.log.drop_before(topic(RUN, name), partition, count)


@pytest.mark.parametrize(("name", "partition"), [(name, partition) for name, partition, _ in LOSSES])
def test_a_range_that_retention_removed_is_one_message_that_says_what_to_do(
    tmp_path: Path, name: TopicName, partition: int
) -> None:
    run = ScoredRun(tmp_path)
    lose(run, name, partition)

    with pytest.raises(RangeMissing) as raised:
        run.audit()

    full = topic(RUN, name)
    assert str(raised.value) == (
        f"{full}[{partition}]: records 0-0 are no longer in the log (retention). Audit what is left with --allow-gaps"
    )
    assert raised.value.first == {(full, partition): 1}


@pytest.mark.parametrize(("name", "partition", "what"), LOSSES)
def test_with_gaps_allowed_the_rest_is_judged_and_the_report_has_a_record_of_the_gap(
    tmp_path: Path, name: TopicName, partition: int, what: str
) -> None:
    run = ScoredRun(tmp_path)
    lose(run, name, partition)

    report = run.audit(allow_gaps=True)

    full = topic(RUN, name)
    assert (report.errors, notices_of(report)) == (0, {"log.gap"}), report.text()
    why = "are no longer in the log (retention)"
    assert report.to_dict()["gaps"] == [{"topic": full, "partition": partition, "first": 0, "end": 1, "why": why}]
    assert report.sections["not_judged"][what] > 0
    assert f"notice log.gap {full}[{partition}]: records 0-0 are no longer in the log" in report.text()


def test_errors_outside_the_gap_are_still_found(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    lose(run, TopicName.TRAJECTORIES, 2)
    Forge(run).edit_decision("tiny/p000005/e0/a0/0", reward=0.5)

    assert "tiny/p000005/e0/a0/0" in errors_of(run.audit(allow_gaps=True))["G1.decision_altered"]


@pytest.mark.parametrize("name", [TopicName.POLICY, TopicName.LEDGER])
def test_policy_and_ledger_must_be_whole(tmp_path: Path, name: TopicName) -> None:
    run = ScoredRun(tmp_path)
    lose(run, name, 0)

    with pytest.raises(RangeMissing, match="Nothing can be told for certain without it: restore the topic"):
        run.audit(allow_gaps=True)


def test_a_topic_of_rows_that_was_cut_off_is_one_error_that_names_the_range(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    del run.log.partition(topic(RUN, TopicName.TRAJECTORIES), 1).entries[1:]

    report = run.audit()

    assert set(errors_of(report)) == {"log.truncated"}, report.text()
    assert report.errors == 1
    assert "tiny.trajectories[1]: records 1-1 were decided by the trainer, but the topic ends at 1" in report.text()


def test_a_policy_topic_that_was_cut_off_is_one_message(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    del run.log.partition(topic(RUN, TopicName.POLICY), 0).entries[4:]

    with pytest.raises(IllegalState, match=r"tiny.policy\[0\] ends at 4, and the trainer has read it up to \d+: "):
        run.audit(allow_gaps=True)


@pytest.mark.parametrize(
    ("name", "schema", "known"),
    [
        (TopicName.TRAJECTORIES, b"trajectory/2.0", "trajectory/1.x"),
        (TopicName.LEDGER, b"decisions/2.0", "decisions/1.x"),
        (TopicName.PROMPTS, b"prompt/2.0", "prompt/1.x"),
        (TopicName.SCORES, b"scores/2.0", "scores/1.x"),
    ],
)
def test_a_record_of_a_newer_driftlog_is_one_message_and_no_damage(
    tmp_path: Path, name: TopicName, schema: bytes, known: str
) -> None:
    run = ScoredRun(tmp_path)
    record = Forge(run).newer(name, schema)

    with pytest.raises(IllegalState) as raised:
        run.audit()

    said = str(raised.value)
    assert said.startswith(f"{topic(RUN, name)}[{record.partition}]@{record.offset}: ")
    assert f"this build knows {known}; upgrade the reader" in said


def test_a_run_whose_scores_are_all_gone_is_a_notice(tmp_path: Path) -> None:
    run = ScoredRun(tmp_path)
    forge = Forge(run)
    for record in forge.records(TopicName.SCORES):
        forge.remove(record)

    report: AuditReport = run.audit()

    assert (report.errors, notices_of(report)) == (0, {"G5.scores"})
    assert "no scores in the log for 12 trained rows" in report.text()
