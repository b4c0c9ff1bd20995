"""Group time-outs fire only for certain: after reading to an end that was taken after the deadline."""

from __future__ import annotations

from consumers.trainer.deadlines import GroupDeadlines
from schemas.errors import LogUnavailable

PLACE = ("demo.trajectories", 0)


class FakeReader:
    """Only what deadlines need of an EventReader."""

    def __init__(self) -> None:
        self.position = 0
        self.end = 0
        self.away = False
        self.asked = 0

    def positions(self) -> dict[tuple[str, int], int]:
        return {PLACE: self.position}

    def end_offsets(self) -> dict[tuple[str, int], int]:
        self.asked += 1
        if self.away:
            raise LogUnavailable("planted")
        return {PLACE: self.end}


def judged(deadlines: GroupDeadlines, now_s: float, reader: FakeReader, *open_ids: str) -> set[str]:
    return set(deadlines.expired(open_ids or ("a",), now_s, reader))  # type: ignore[arg-type]


def test_a_group_is_not_late_before_its_deadline() -> None:
    deadlines, reader = GroupDeadlines(60), FakeReader()
    deadlines.add(["a"], 0)

    assert judged(deadlines, 59.9, reader) == set()
    assert reader.asked == 0


def test_a_late_group_is_closed_after_everything_in_the_log_was_read() -> None:
    deadlines, reader = GroupDeadlines(60), FakeReader()
    deadlines.add(["a"], 0)
    reader.end = 5
    first = judged(deadlines, 61, reader)
    reader.position = 4
    unread = judged(deadlines, 62, reader)
    reader.position = 5

    assert (first, unread) == (set(), set())
    assert judged(deadlines, 63, reader) == {"a"}


def test_the_end_counts_that_was_taken_after_the_deadline() -> None:
    """The reader had read everything there was before; rows that arrived since must be read first."""
    deadlines, reader = GroupDeadlines(60), FakeReader()
    deadlines.add(["a"], 0)
    reader.position, reader.end = 5, 9

    assert judged(deadlines, 61, reader) == set()
    assert judged(deadlines, 62, reader) == set()
    assert reader.asked == 1, "the broker is asked once a set of suspects"


def test_a_group_that_was_completed_while_reading_on_is_not_closed() -> None:
    deadlines, reader = GroupDeadlines(60), FakeReader()
    deadlines.add(["a", "b"], 0)
    judged(deadlines, 61, reader, "a", "b")

    assert judged(deadlines, 62, reader, "b") == {"b"}


def test_while_the_broker_is_away_nothing_is_judged() -> None:
    deadlines, reader = GroupDeadlines(60), FakeReader()
    deadlines.add(["a"], 0)
    reader.away = True
    away = [judged(deadlines, 61 + i, reader) for i in range(3)]
    reader.away = False

    assert away == [set()] * 3
    assert judged(deadlines, 70, reader) == set(), "the end is asked for now"
    assert judged(deadlines, 71, reader) == {"a"}


def test_a_restart_gives_every_open_group_its_full_time_again() -> None:
    deadlines, reader = GroupDeadlines(60), FakeReader()
    deadlines.add(["a"], 0)
    deadlines.restart(["a"], 50)

    assert judged(deadlines, 100, reader) == set()
    assert reader.asked == 0


def test_a_group_that_was_never_added_never_expires() -> None:
    assert judged(GroupDeadlines(60), 10**6, FakeReader(), "stranger") == set()


def test_memory_is_bounded_by_the_open_set() -> None:
    deadlines, reader = GroupDeadlines(60), FakeReader()
    for number in range(1000):
        deadlines.add([f"g{number}"], number)
        judged(deadlines, number, reader, f"g{number}")

    assert len(deadlines._deadline_s) <= 18


def test_the_end_of_a_run_waits_for_what_lay_in_the_log_when_it_was_first_asked() -> None:
    deadlines, reader = GroupDeadlines(60), FakeReader()
    reader.end = 3
    first = deadlines.caught_up(reader)  # type: ignore[arg-type]
    reader.end, reader.position = 100, 3

    assert not first
    assert deadlines.caught_up(reader)  # type: ignore[arg-type]
