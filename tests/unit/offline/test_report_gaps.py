"""What a report cannot draw because the log no longer holds it is said on top, or is the one message there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.offline.report.build import Beside, build_page
from consumers.offline.report.reading import read_run
from schemas.errors import IllegalState, RangeMissing
from schemas.topics import TopicName, topic
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN


def _notices(run: TinyRun) -> list[str]:
    page = build_page(read_run(run.run_log()), Beside(made_at_us=0, build="test"))
    assert page.state == "ended"
    return list(page.notices)


def test_a_policy_topic_that_lost_its_beginning_is_one_message_and_no_run_that_has_not_begun(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.log.drop_before(topic(RUN, TopicName.POLICY), 0, 2)

    with pytest.raises(RangeMissing) as caught:
        read_run(run.run_log())

    assert str(caught.value) == (
        "tiny.policy[0]: records 0-1 are no longer in the log (retention). "
        "Nothing can be told for certain without it: restore the topic"
    )


@pytest.mark.parametrize(
    ("name", "partition"), [(TopicName.LEDGER, 0), (TopicName.TRAJECTORIES, 2), (TopicName.PROMPTS, 3)]
)
def test_a_range_that_retention_removed_is_a_notice_on_top(tmp_path: Path, name: TopicName, partition: int) -> None:
    run = TinyRun(tmp_path)
    full = topic(RUN, name)
    run.log.drop_before(full, partition, 1)

    (notice,) = _notices(run)

    lost = f"{full}[{partition}]: records 0-0 are no longer in the log (retention)"
    assert notice == f"{lost}: what stands on them is not in this report."


def test_rows_that_were_cut_off_are_a_notice_on_top(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    del run.log.partition(topic(RUN, TopicName.TRAJECTORIES), 1).entries[1:]

    (notice,) = _notices(run)

    assert notice.startswith("tiny.trajectories[1]: records 1-1 were decided by the trainer, but the topic ends at 1")


@pytest.mark.parametrize(
    ("name", "schema", "known"),
    [
        (TopicName.TRAJECTORIES, b"trajectory/2.0", "trajectory/1.x"),
        (TopicName.LEDGER, b"decisions/2.0", "decisions/1.x"),
    ],
)
def test_records_of_a_newer_schema_version_are_one_message(
    tmp_path: Path, name: TopicName, schema: bytes, known: str
) -> None:
    run = TinyRun(tmp_path)
    record = Forge(run).newer(name, schema)

    with pytest.raises(IllegalState) as caught:
        read_run(run.run_log())

    assert str(caught.value).startswith(f"{topic(RUN, name)}[{record.partition}]@{record.offset}: ")
    assert f"this build knows {known}; upgrade the reader" in str(caught.value)
