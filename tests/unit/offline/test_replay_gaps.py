"""What a replay needs and the log no longer holds, or holds in a newer form, is one message; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from consumers.offline.replay.plan import NEWEST
from consumers.offline.wholeness import read_policy
from infra.ports import Record
from schemas.errors import IllegalState, RangeMissing
from schemas.headers import is_arrow
from schemas.ledger import StepCompleted, decode_ledger_control
from schemas.topics import TopicName
from tests.fakes.replay_rig import Rig, parts_of
from tests.fakes.simulated_run import SimulatedRun
from tests.fakes.tiny_forge import Forge, remove_step

VERSIONS = 4


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> SimulatedRun:
    return SimulatedRun(tmp_path_factory.mktemp("simulated"), versions=VERSIONS)


@pytest.fixture
def run(simulated: SimulatedRun) -> Iterator[SimulatedRun]:
    with simulated.restored():
        yield simulated


def _forge(run: SimulatedRun) -> Forge:
    return Forge(run)  # type: ignore[arg-type]


def _step_record(run: SimulatedRun, version: int) -> Record:
    for record in run.records(TopicName.LEDGER):
        if not is_arrow(record.headers):
            control = decode_ledger_control(record.value)
            if isinstance(control, StepCompleted) and control.version_out == version:
                return record
    raise AssertionError(f"no step made version {version}")


def _cut_ledger_behind(run: SimulatedRun, version: int) -> int:
    """Retention removes everything up to the step of this version; the first offset that is left."""
    first = _step_record(run, version).offset + 1
    run.log.drop_before("sim.ledger", 0, first)
    return first


def _refused(run: SimulatedRun, kind: type[IllegalState], first: int = 1, last: int | None = NEWEST) -> str:
    """The one message; nothing was trained before it."""
    rig = Rig(run=run)
    with pytest.raises(kind) as caught:
        rig.make(first, last)
    assert (rig.learner.batches, rig.words) == ([], [])
    return str(caught.value)


# ---------------------------------------------------------------------- a newer driftlog


def test_decisions_of_a_newer_schema_version_are_one_message_and_nothing_is_trained(run: SimulatedRun) -> None:
    record = _forge(run).newer(TopicName.LEDGER, b"decisions/2.0")

    said = _refused(run, IllegalState)

    assert said.startswith(f"sim.ledger[0]@{record.offset}: cannot be read: schema_version: ")
    assert "'decisions/2.0', this build knows decisions/1.x; upgrade the reader" in said


@pytest.mark.parametrize(
    ("name", "schema", "known"),
    [
        (TopicName.TRAJECTORIES, b"trajectory/2.0", "trajectory/1.x"),
        (TopicName.SCORES, b"scores/2.0", "scores/1.x"),
    ],
)
def test_rows_of_a_newer_schema_version_are_one_message(
    run: SimulatedRun, name: TopicName, schema: bytes, known: str
) -> None:
    record = _forge(run).newer(name, schema)

    with pytest.raises(IllegalState) as caught:
        Rig(run=run).make()

    assert str(caught.value).startswith(f"sim.{name.value}[{record.partition}]@{record.offset}: ")
    assert f"this build knows {known}; upgrade the reader" in str(caught.value)


def test_decisions_that_are_damaged_are_named_and_their_step_is_not_made_from_what_is_left(run: SimulatedRun) -> None:
    record = next(r for r in run.records(TopicName.LEDGER) if is_arrow(r.headers))
    _forge(run).flip_byte(record, len(record.value or b"") // 2)
    rig = Rig(run=run)

    steps = rig.make()

    assert parts_of(steps) == {1: ("data",)}
    assert [step.trained for step in steps] == [False, True, True, True]
    assert len(rig.learner.batches) == 3
    assert {(d.subject, d.place) for d in steps[0].differences} == {
        ("decisions", f"ledger[0]@{record.offset}"), ("batch", ""),
    }  # fmt: skip
    assert "the ledger names 0 rows of the batch, its StepCompleted says 6" in steps[0].differences[-1].detail


# ---------------------------------------------------------------------- retention


def test_planned_versions_that_the_ledger_no_longer_holds_are_named_with_the_range(run: SimulatedRun) -> None:
    first = _cut_ledger_behind(run, 1)

    said = _refused(run, RangeMissing)

    assert said == (
        f"sim.ledger[0]: records 0-{first - 1} are no longer in the log (retention). "
        "The steps of versions 1, 2 are gone with them: ask for versions from 3 on"
    )  # the transaction of version 2 is the first that is left: it may have lost its beginning


def test_versions_behind_the_gap_are_made_again_all_the_same(run: SimulatedRun) -> None:
    _cut_ledger_behind(run, 1)

    steps = Rig(run=run).make(3, NEWEST)

    assert [(step.version, step.equal) for step in steps] == [(3, True), (4, True)]


def test_a_ledger_without_any_whole_step_says_that_no_later_one_is(run: SimulatedRun) -> None:
    _cut_ledger_behind(run, VERSIONS)

    assert _refused(run, RangeMissing).endswith("The steps of versions 1-4 are gone with them: no later one is whole")


def test_a_policy_topic_that_lost_its_beginning_is_named_before_a_plan_is_made(run: SimulatedRun) -> None:
    run.log.drop_before("sim.policy", 0, 3)

    with pytest.raises(RangeMissing) as caught:
        read_policy(run.run_log())

    assert str(caught.value) == (
        "sim.policy[0]: records 0-2 are no longer in the log (retention). "
        "Nothing can be told for certain without it: restore the topic"
    )


# ---------------------------------------------------------------------- topics that were cut off


def test_rows_that_were_cut_off_are_one_message_that_names_range_and_version(run: SimulatedRun) -> None:
    _, decision = _forge(run).trained()[-1]
    assert decision.partition is not None and decision.offset is not None
    partition = run.log.partition("sim.trajectories", decision.partition)
    end = len(partition.entries)
    del partition.entries[decision.offset :]

    said = _refused(run, RangeMissing)

    place = f"sim.trajectories[{decision.partition}]"
    assert said.startswith(f"{place}: records {decision.offset}-{end - 1} were decided by the trainer, but the topic ")
    assert f"ends at {decision.offset}: it was truncated or made anew. Version 4 was trained on some of them" in said
    assert said.endswith("restore the topic, or ask for versions up to 3")
    assert parts_of(Rig(run=run).make(1, 3)) == {}


def test_a_policy_topic_that_was_cut_off_is_one_message(run: SimulatedRun) -> None:
    offset = next(e.offset for e in run.run_log().policy() if getattr(e.event, "version", None) == 3)
    del run.log.partition("sim.policy", 0).entries[offset:]

    assert _refused(run, IllegalState) == (
        f"sim.policy[0] ends at {offset} without version 3, whose step is in the ledger: "
        "it was truncated or made anew. Nothing can be told for certain without it: restore the topic"
    )


def _whole_step(run: SimulatedRun) -> None:
    remove_step(_forge(run), 2)


def _last_steps(run: SimulatedRun) -> None:
    del run.log.partition("sim.ledger", 0).entries[_step_record(run, 2).offset + 1 :]


@pytest.mark.parametrize(("remove", "lost"), [(_whole_step, "version 2"), (_last_steps, "versions 3, 4")])
def test_a_version_without_a_step_in_a_whole_ledger_is_one_message(
    run: SimulatedRun, remove: Callable[[SimulatedRun], None], lost: str
) -> None:
    remove(run)

    said = _refused(run, IllegalState)

    assert said == f"sim.ledger holds no step that made {lost}, which policy says was published: run `driftlog audit`"


def test_a_newest_version_that_the_ledger_had_not_yet_is_told_and_the_rest_is_made(run: SimulatedRun) -> None:
    del run.log.partition("sim.ledger", 0).entries[_step_record(run, 3).offset + 1 :]
    policy = run.log.partition("sim.policy", 0)
    published = next(e.offset for e in run.run_log().policy() if getattr(e.event, "version", None) == VERSIONS)
    del policy.entries[published + 1 :]
    rig = Rig(run=run)

    steps = rig.make()

    assert [step.version for step in steps] == [1, 2, 3]
    assert rig.words == ["version 4 was published while the ledger was read: ask again for it"]
