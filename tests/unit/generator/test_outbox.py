"""Finished groups on their way: split when too large, sent again when in doubt, lost only with a reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from infra.ports import Message, Placed
from producers.outbox import Outbox
from schemas.errors import BudgetExhausted, DeliveryFailed, MessageTooLarge
from schemas.trajectory import Trajectory
from schemas.trajectory_codec import decode_group
from tests.fakes.log_script import LIMITS, group

A, B = "demo/p000000/e0/a0", "demo/p000001/e0/a0"


class Slip:
    """The Delivery port."""

    def __init__(self, outcome: Placed | Exception | None) -> None:
        self.outcome = outcome

    def done(self) -> bool:
        return self.outcome is not None

    def result(self, timeout_s: float) -> Placed:
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Post:
    """An EventWriter with a row limit a record, refused at once or by the broker."""

    def __init__(self) -> None:
        self.client_rows = self.broker_rows = 1000
        self.budget = 1000
        self.failures = 0
        self.delivered: list[tuple[str, list[int]]] = []
        self.sent = 0

    def send(self, message: Message) -> Slip:
        rows = decode_group(message.value, message.headers, LIMITS)
        if len(rows) > self.client_rows:
            raise MessageTooLarge(f"{len(rows)} rows")
        if self.budget <= 0:
            raise BudgetExhausted("wait")
        self.budget -= 1
        self.sent += 1
        if len(rows) > self.broker_rows:
            return Slip(MessageTooLarge(f"{len(rows)} rows"))
        if self.failures:
            self.failures -= 1
            return Slip(DeliveryFailed("planted"))
        self.delivered.append((message.key.decode(), [r.trajectory.index_in_group for r in rows if r.trajectory]))
        return Slip(Placed(partition=0, offset=self.sent))


def outbox(post: Post) -> Outbox:
    return Outbox(post, "demo.trajectories", "generator/g0")  # type: ignore[arg-type]


def done(box: Outbox, steps: int = 12) -> list[tuple[int, int]]:
    return [claim for _ in range(steps) for claim in box.step()]


def rows(group_id: str = A) -> list[Trajectory]:
    return group(group_id, [1, 0, 0, 1])


def test_a_claim_is_done_when_its_group_is_acknowledged() -> None:
    post = Post()
    box = outbox(post)
    box.put((3, 7), rows())
    first = box.step()

    assert first == []
    assert box.group_ids() == {A}
    assert done(box) == [(3, 7)]
    assert post.delivered == [(A, [0, 1, 2, 3])]
    assert len(box) == 0


@pytest.mark.parametrize("side", ["client_rows", "broker_rows"])
def test_a_group_too_large_for_one_record_is_split_and_its_siblings_are_delivered(side: str) -> None:
    """C55: refused by the client at once, or only by the broker's answer."""
    post = Post()
    setattr(post, side, 1)
    box = outbox(post)
    box.put((0, 0), rows())
    setattr(post, side, 2)
    box.put((0, 1), rows(B))

    assert sorted(done(box)) == [(0, 0), (0, 1)]
    assert sorted(post.delivered) == [(A, [0, 1]), (A, [2, 3]), (B, [0, 1]), (B, [2, 3])]
    assert box.lost_rows == 0


@pytest.mark.parametrize("side", ["client_rows", "broker_rows"])
def test_a_single_row_that_is_too_large_is_lost_with_its_group_named(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C55: nothing can be split any further; the trainer closes the group by its time-out."""
    post = Post()
    setattr(post, side, 0)
    box = outbox(post)
    box.put((0, 0), rows()[:2])

    assert done(box) == [(0, 0)]
    assert box.lost_rows == 2
    lost = [record for record in caplog.records if record.message == "rows_lost"]
    assert [record.driftlog_fields["group"] for record in lost] == [A, A]  # type: ignore[attr-defined]


def test_a_row_that_no_reader_would_take_is_lost_alone_and_its_siblings_go_out() -> None:
    """C87 and its kin: a completion without a token never stops the worker."""
    post = Post()
    box = outbox(post)
    bad = rows()
    empty = np.array([], dtype=np.float32)
    bad[1] = replace(
        bad[1], token_ids=empty.astype(np.int32), logprobs=empty, loss_mask=empty.astype(np.bool_), segments=()
    )
    box.put((0, 0), bad)

    assert done(box) == [(0, 0)]
    assert sorted(index for _, indexes in post.delivered for index in indexes) == [0, 2, 3]
    assert box.lost_rows == 1


def test_a_group_above_the_codecs_own_limit_is_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: the encoder refuses the record before any writer sees it."""
    limits = replace(LIMITS, vocabulary_size=2**31, max_bytes=len(_encoded(rows())) - 1)
    monkeypatch.setattr("schemas.trajectory_codec.WRITER_LIMITS", limits)
    post = Post()
    box = outbox(post)
    box.put((0, 0), rows())

    assert done(box) == [(0, 0)]
    assert sorted(post.delivered) == [(A, [0, 1]), (A, [2, 3])]


def _encoded(members: list[Trajectory]) -> bytes:
    from schemas.trajectory_codec import encode_group

    return encode_group(members)


def test_a_full_budget_stops_admission_and_nothing_is_lost() -> None:
    post = Post()
    post.budget = 0
    box = outbox(post)
    box.put((0, 0), rows())
    waiting = (done(box), box.is_stuck, post.sent)
    post.budget = 5

    assert waiting == ([], True, 0)
    assert done(box) == [(0, 0)]
    assert not box.is_stuck


@pytest.mark.parametrize(("failures", "delivered", "lost"), [(1, 1, 0), (2, 1, 0), (3, 0, 4), (9, 0, 4)])
def test_a_failed_delivery_is_sent_three_times_at_most(failures: int, delivered: int, lost: int) -> None:
    post = Post()
    post.failures = failures
    box = outbox(post)
    box.put((0, 0), rows())

    assert done(box) == [(0, 0)]
    assert len(post.delivered) == delivered
    assert box.lost_rows == lost
    assert post.sent == min(failures + 1, 3)


def test_a_claim_is_not_done_while_one_part_is_on_its_way() -> None:
    post = Post()
    post.client_rows, post.budget = 2, 1
    box = outbox(post)
    box.put((0, 0), rows())
    half = done(box)
    post.budget = 1

    assert half == []
    assert done(box) == [(0, 0)]
