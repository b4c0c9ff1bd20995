"""What every adapter promises of consumer groups (GroupReader)."""

from __future__ import annotations

import pytest

from infra.ports import GroupReader, Record
from tests.contract.log_contract import LogHarness, message, texts, until, write


def settled(harness: LogHarness, *readers: GroupReader, partitions: int) -> None:
    """Wait until the readers own all partitions between them, evenly."""

    def even() -> bool:
        owned = [reader.assignment() for reader in readers]
        sizes = [len(one) for one in owned]
        return len(frozenset().union(*owned)) == partitions == sum(sizes) and max(sizes) - min(sizes) <= 1

    until(harness, even, f"{partitions} partitions spread over {len(readers)} members")


def take(harness: LogHarness, reader: GroupReader, count: int) -> list[Record]:
    """Read this many records."""
    got: list[Record] = []

    def enough() -> bool:
        got.extend(reader.poll(100))
        return len(got) >= count

    until(harness, enough, f"{count} records, {len(got)} so far")
    return got


class GroupContract:
    """GroupReader."""

    def test_a_group_without_offsets_starts_at_the_beginning(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=2)
        write(harness, message(topic, "a", partition=0), message(topic, "b", partition=1))
        reader = harness.group_reader(harness.name("g"), topic)
        assert sorted(texts(take(harness, reader, 2))) == ["a", "b"]
        assert reader.assignment() == {0, 1}
        assert reader.committed(0) is None

    def test_a_restart_goes_on_at_what_was_committed_for_every_partition(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=3)
        write(harness, *(message(topic, f"{p}{i}", partition=p) for p in range(3) for i in range(3)))
        reader = harness.group_reader(harness.name("g"), topic)
        take(harness, reader, 9)
        reader.commit({0: (3, ""), 1: (1, "done:2"), 2: (2, "")})
        reader.close()
        assert harness.committed(harness.name("g")) == {(topic, 0): 3, (topic, 1): 1, (topic, 2): 2}
        again = harness.group_reader(harness.name("g"), topic)
        assert sorted(texts(take(harness, again, 3))) == ["11", "12", "22"]
        assert again.committed(1) == (1, "done:2")
        assert again.committed(0) == (3, "")

    def test_a_second_member_takes_its_share_from_the_committed_offsets(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=4)
        write(harness, *(message(topic, f"{p}{i}", partition=p) for p in range(4) for i in range(2)))
        first = harness.group_reader(harness.name("g"), topic)
        take(harness, first, 8)
        first.commit(dict.fromkeys(range(4), (1, "")))
        until(harness, lambda: len(harness.committed(harness.name("g"))) == 4, "the commit")
        second = harness.group_reader(harness.name("g"), topic)
        settled(harness, first, second, partitions=4)
        moved = second.assignment()
        assert sorted(texts(take(harness, second, 2))) == sorted(f"{p}1" for p in moved)
        assert all(first.committed(p) is None for p in moved)

    def test_a_partition_that_moved_is_not_committed_by_its_last_owner(self, harness: LogHarness) -> None:
        topic = harness.topic(partitions=2)
        write(harness, *(message(topic, f"{p}{i}", partition=p) for p in range(2) for i in range(5)))
        first = harness.group_reader(harness.name("g"), topic)
        take(harness, first, 10)
        second = harness.group_reader(harness.name("g"), topic)
        settled(harness, first, second, partitions=2)
        (mine,), (moved,) = first.assignment(), second.assignment()
        second.commit({moved: (5, "new owner")})
        until(harness, lambda: (topic, moved) in harness.committed(harness.name("g")), "the new owner's commit")
        first.commit({mine: (4, ""), moved: (1, "old owner")})
        until(harness, lambda: (topic, mine) in harness.committed(harness.name("g")), "the old owner's commit")
        assert harness.committed(harness.name("g")) == {(topic, mine): 4, (topic, moved): 5}

    def test_leaving_gives_everything_back_and_rejoining_starts_at_the_committed_offset(
        self, harness: LogHarness
    ) -> None:
        topic = harness.topic(partitions=2)
        write(harness, *(message(topic, f"{p}{i}", partition=p) for p in range(2) for i in range(2)))
        leaver, stayer = (harness.group_reader(harness.name("g"), topic) for _ in range(2))
        settled(harness, leaver, stayer, partitions=2)
        take(harness, leaver, 2)
        leaver.leave()
        assert leaver.assignment() == frozenset()
        assert leaver.poll(10) == []
        settled(harness, stayer, partitions=2)
        assert len(take(harness, stayer, 4)) == 4
        stayer.commit({0: (1, ""), 1: (1, "")})
        stayer.close()
        leaver.rejoin()
        leaver.rejoin()
        settled(harness, leaver, partitions=2)
        assert sorted(texts(take(harness, leaver, 2))) == ["01", "11"]

    def test_commits_queued_before_leaving_are_done(self, harness: LogHarness) -> None:
        topic = harness.topic()
        write(harness, message(topic, "a"))
        reader = harness.group_reader(harness.name("g"), topic)
        take(harness, reader, 1)
        reader.commit({0: (1, "m")})
        reader.leave()
        until(harness, lambda: harness.committed(harness.name("g")) == {(topic, 0): 1}, "the commit")

    def test_metadata_that_the_broker_would_never_take_is_an_error_at_once(self, harness: LogHarness) -> None:
        reader = harness.group_reader(harness.name("g"), harness.topic())
        settled(harness, reader, partitions=1)
        with pytest.raises(ValueError, match="4097 bytes of metadata, the broker takes 4096"):
            reader.commit({0: (1, "x" * 4097)})

    def test_a_committed_offset_below_the_log_goes_on_at_what_is_left_and_never_at_the_end(
        self, harness: LogHarness
    ) -> None:
        """C64: committed 1; the log now starts at 3 and ends at 5."""
        topic = harness.topic()
        write(harness, *(message(topic, str(i)) for i in range(5)))
        reader = harness.group_reader(harness.name("g"), topic)
        take(harness, reader, 5)
        reader.commit({0: (1, "done:3")})
        reader.close()
        harness.drop_before(topic, 0, 3)
        again = harness.group_reader(harness.name("g"), topic)
        assert texts(take(harness, again, 2)) == ["3", "4"]
        assert again.committed(0) is None

    def test_close_twice_is_fine(self, harness: LogHarness) -> None:
        reader = harness.group_reader(harness.name("g"), harness.topic())
        reader.close()
        reader.close()
