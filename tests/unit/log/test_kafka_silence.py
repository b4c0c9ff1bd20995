"""A silent Kafka client: at fault only where committed records lay unread at two looks in a row."""

from __future__ import annotations

from infra.kafka_silence import Silence

PLACE = ("demo.policy", 0)
OTHER = ("demo.policy", 1)


def test_the_first_look_is_due_a_while_after_the_last_record() -> None:
    silence = Silence(10.0)

    assert [silence.is_due(now_s) for now_s in (0.0, 9.9, 10.0)] == [False, False, True]
    silence.heard()
    assert [silence.is_due(now_s) for now_s in (11.0, 20.9, 21.0)] == [False, False, True]


def test_a_client_that_stands_before_records_at_two_looks_is_at_fault() -> None:
    silence = Silence(10.0)

    assert silence.look({PLACE: 3, OTHER: 7}, {PLACE: 5, OTHER: 7}, 0.0) is None
    assert not silence.is_due(9.0)
    assert silence.look({PLACE: 3, OTHER: 7}, {PLACE: 6, OTHER: 7}, 10.0) == PLACE


def test_one_that_read_something_in_between_is_not() -> None:
    silence = Silence(10.0)
    silence.look({PLACE: 3}, {PLACE: 5}, 0.0)
    silence.heard()

    assert silence.look({PLACE: 3}, {PLACE: 5}, 10.0) is None


def test_nor_is_one_that_moved_or_stands_at_the_end_or_does_not_know_where_it_stands() -> None:
    silence = Silence(10.0)

    assert silence.look({PLACE: 3}, {PLACE: 5}, 0.0) is None
    assert silence.look({PLACE: 4}, {PLACE: 5}, 10.0) is None
    assert silence.look({PLACE: 5}, {PLACE: 5}, 20.0) is None
    assert silence.look({PLACE: None}, {PLACE: 5}, 30.0) is None
    assert silence.look({PLACE: None}, {PLACE: 5}, 40.0) is None


def test_it_is_replaced_once_for_one_place() -> None:
    silence = Silence(10.0)
    looks = []
    for number in range(6):
        looks.append(silence.look({PLACE: 3}, {PLACE: 5}, 10.0 * number))
        if looks[-1] is not None:
            silence.replaced()

    assert looks == [None, PLACE, None, None, None, None]
    assert [silence.look({PLACE: 4}, {PLACE: 5}, now_s) for now_s in (70.0, 80.0)] == [None, PLACE]


def test_a_replacement_that_failed_is_wanted_again() -> None:
    silence = Silence(10.0)

    assert [silence.look({PLACE: 3}, {PLACE: 5}, 10.0 * number) for number in range(4)] == [None, PLACE, PLACE, PLACE]
