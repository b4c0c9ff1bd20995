"""What the transport benchmark's peers do with messages: the two Redis streams, their codec, a peer that is missing."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import transport_redis
from benchmarks.bench_codec import codecs, make_group
from benchmarks.transport_ends import Where
from benchmarks.transport_pairs import distinct_groups
from benchmarks.transport_peers import PEERS, missing
from benchmarks.transport_redis import BatchedReceiver, BatchedSender, PipelineReceiver, PipelineSender, rows
from schemas.trajectory_schema import TRAJECTORY


class Stream:
    """A Redis client that has one stream in memory, and tells how it was asked."""

    def __init__(self) -> None:
        self.entries: list[tuple[bytes, dict[bytes, bytes]]] = []
        self.asked: list[Mapping[str, Any]] = []

    def xadd(self, name: str, fields: Mapping[Any, Any], **words: Any) -> None:
        self.asked.append(words)
        entry = {_bytes(key): _bytes(value) for key, value in fields.items()}
        self.entries.append((b"%d-0" % (len(self.entries) + 1), entry))

    def xread(self, streams: Mapping[str, bytes | int], count: int, block: int) -> list[Any]:
        self.asked.append({"count": count})
        ((name, last),) = streams.items()
        after = [entry for entry in self.entries if int(entry[0].split(b"-")[0]) > int(_bytes(last).split(b"-")[0])]
        return [[name.encode(), after[:count]]] if after else []


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(transport_redis, "connected", lambda at: stream)
    return stream


AT = Where(name="s", bootstrap="", redis_port=0, free_port=0, directory=Path(), queue=None)


def test_as_pipelinerl_an_entry_has_an_index_the_stream_a_bound_and_a_read_one_entry(stream: Stream) -> None:
    sender, receiver = PipelineSender(AT), PipelineReceiver(AT)
    for message in (b"first", b"second"):
        sender.send(message)

    assert [receiver.poll() for _ in range(3)] == [[b"first"], [b"second"], []]
    assert stream.entries[1][1] == {b"index": b"1", b"data": b"second"}
    assert stream.asked == [{"maxlen": 1_000_000, "approximate": True}] * 2 + [{"count": 1}] * 3


def test_as_pipelinerl_a_reader_stops_at_an_index_that_is_not_due(stream: Stream) -> None:
    PipelineSender(AT).send(b"first")
    PipelineSender(AT).send(b"a second writer's first")
    receiver = PipelineReceiver(AT)

    assert receiver.poll() == [b"first"]
    with pytest.raises(SystemExit, match="entry 0 came, 1 was due"):
        receiver.poll()


def test_batched_a_read_takes_all_that_is_there(stream: Stream) -> None:
    sender, receiver = BatchedSender(AT), BatchedReceiver(AT)
    for message in (b"first", b"second"):
        sender.send(message)

    assert [receiver.poll(), receiver.poll()] == [[b"first", b"second"], []]


def test_entries_are_found_in_the_answers_of_both_redis_protocols() -> None:
    entry = (b"1-0", {b"d": b"x"})

    assert rows([[b"s", [entry]]]) == rows({b"s": [[entry]]}) == [entry]
    assert rows([]) == rows({}) == []


def test_a_pickle_of_lists_names_its_columns_and_ends_in_the_rows_and_hashes_of_the_other_codecs() -> None:
    group = make_group(members=2, prompt=3, completion=4)
    found = {codec.name: codec for codec in codecs(group)}
    written = found["pickle of lists"].encode(group)
    first = pickle.loads(written)[0]

    assert list(first) == list(TRAJECTORY.names)
    assert [type(first[name]) for name in ("prompt_token_ids", "token_ids", "logprobs", "loss_mask")] == [list] * 4
    decoded: Any = found["pickle of lists"].decode(written)
    expected: Any = found["pickle"].decode(found["pickle"].encode(group))
    assert [row_hash for _, row_hash in decoded] == [row_hash for _, row_hash in expected]
    assert all(np.array_equal(one.logprobs, two.logprobs) for (one, _), two in zip(decoded, group, strict=True))


def test_what_is_sent_differs_from_group_to_group() -> None:
    groups = distinct_groups(3)

    assert len({trajectory.token_ids.tobytes() for group in groups for trajectory in group}) == 24
    assert len({trajectory.logprobs.tobytes() for group in groups for trajectory in group}) == 24


def test_every_peer_has_a_codec_and_one_without_its_server_says_so() -> None:
    names = {codec.name for codec in codecs(make_group(members=1, prompt=1, completion=1))} | {"msgspec", "orjson"}
    redis = next(peer for peer in PEERS if peer.module == "redis")

    assert {peer.codec for peer in PEERS} <= names
    assert missing(redis, 0) != ""
