"""A publication behind the compute: what is trained meanwhile, what waits for it, what its failure throws away."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from consumers.trainer.batch import TrainBatch
from schemas.errors import Fenced, LogUnavailable, StepFailed, StoreStuck
from schemas.ledger import Subject
from tests.cases.trainer_rig import TrainerRig
from tests.fakes.inline_executor import InlineExecutor
from tests.sim.behind import BehindExecutor
from tests.sim.same_weights import content_digest, final_weights

SAVE_S = 1.0


class Overlapped(TrainerRig):
    """A rig whose checkpoints take a second; `run_thread` lets the trainer's thread have its turn."""

    def __init__(self, directory: Path, **plan: Any) -> None:
        super().__init__(directory, **{"overlap": True, **plan})
        self.thread = BehindExecutor(self.clock, lambda: SAVE_S)
        self.trainer._p.executor = self.thread

    def run_thread(self, seconds: float = 2 * SAVE_S) -> None:
        self.clock.advance(seconds)
        self.thread.advance()

    def lags(self) -> dict[str, int | None]:
        return {str(d.group_id): d.policy_lag for d in self.decisions() if d.subject is Subject.TRAJECTORY}


def one_step_ahead(directory: Path, **plan: Any) -> Overlapped:
    """Version 1 is under way, version 2 is trained on it, and the rows of no third step are there."""
    rig = Overlapped(directory, **plan).begin()
    rig.answer(0, 1, 2, 3)
    rig.step()
    assert rig.trainer._publisher.head is not None
    assert rig.trainer._computed is not None
    assert rig.steps() == []
    return rig


def test_the_next_step_is_trained_before_the_last_one_is_committed_and_its_lag_counts_it(tmp_path: Path) -> None:
    rig = one_step_ahead(tmp_path)
    trained = rig.trainer._p.learner.steps  # type: ignore[attr-defined]
    rig.run_thread()
    rig.step()
    rig.run_thread()
    rig.step()

    assert trained == 2
    assert [(s.version_in, s.version_out) for s in rig.steps()] == [(0, 1), (1, 2)]
    groups = [request.group_id for request in rig.requests()[:4]]
    assert [rig.lags()[group] for group in groups] == [0, 0, 1, 1]


def test_there_is_never_more_than_one_step_ahead(tmp_path: Path) -> None:
    rig = one_step_ahead(tmp_path, run_ahead=2, max_lag=3, versions=5)
    rig.answer(4, 5)
    rig.step(10)

    assert rig.trainer._p.learner.steps == 2  # type: ignore[attr-defined]


def test_a_step_waits_for_what_must_be_asked_for_first(tmp_path: Path) -> None:
    """A group of the next step ended without training: without overlap it would be asked for before the step."""
    rig = Overlapped(tmp_path, run_ahead=2, max_lag=2, versions=5).begin()
    rig.answer(0, 1)
    rig.step()
    rig.send(rig.rows(rig.requests()[2], [None] * 4))
    rig.answer(3, 4, 5)
    rig.step(6)
    assert rig.trainer._p.learner.steps == 1  # type: ignore[attr-defined]
    rig.run_thread()
    rig.step()

    assert [control.type for control in rig.controls()][-2:] == ["StepCompleted", "Settled"]


def test_the_position_is_that_of_the_hand_over(tmp_path: Path) -> None:
    """Rows that come while a version is under way are read, and decided by the next transaction."""
    rig = Overlapped(tmp_path).begin()
    rig.answer(0, 1)
    rig.step()
    late = rig.send(rig.rows(rig.requests()[0], [1.0, 0.0, 0.0, 1.0], claim="g0/i1/99"))
    rig.step()
    rig.run_thread()
    rig.step(1)

    position = rig.steps()[0].position.partitions[late.partition]
    assert position.next_offset <= late.offset
    assert all((d.partition, d.offset) != (late.partition, late.offset) for d in rig.decisions())
    rig.wait(2.0)
    told = [(d.offset, d.reason) for d in rig.decisions() if (d.partition, d.offset) == (late.partition, late.offset)]
    assert set(told) == {(late.offset, "group_closed")} or {reason for _, reason in told} == {"duplicate"}


@pytest.mark.parametrize("fate", ["aborted", "committed"])
def test_a_publication_of_unknown_outcome_throws_the_step_ahead_away_and_nothing_is_done_twice(
    fate: Any, tmp_path: Path
) -> None:
    rig = one_step_ahead(tmp_path)
    rig.log.next_commit = fate
    rig.run_thread()
    rig.step(1)
    assert rig.trainer._computed is None
    for _ in range(4):
        rig.step(6)
        rig.run_thread()
    rig.step(6)

    assert [(s.version_in, s.version_out) for s in rig.steps()] == [(0, 1), (1, 2)]
    assert rig.trainer._p.learner.steps == 2  # type: ignore[attr-defined]
    assert [told[1] for told in rig.told()] == ["trained"] * 4


def test_recovery_waits_for_the_publication_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transaction would otherwise be written by the new writer, beside what is trained again."""
    rig = one_step_ahead(tmp_path)

    def away(*arguments: object) -> bool:
        raise LogUnavailable("planted")

    with monkeypatch.context() as patch:
        patch.setattr(rig.trainer.follower, "advance", away)
        rig.step(1)
    epochs: list[str] = []
    monkeypatch.setattr(rig.trainer._p.writer, "init", lambda: epochs.append("init"))
    rig.step(5)
    assert epochs == []
    rig.run_thread()
    rig.step(1)

    assert epochs == ["init"]
    assert [s.version_out for s in rig.steps()] == [1]


def test_a_fenced_publication_ends_the_trainer_also_while_it_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = one_step_ahead(tmp_path)
    rig.trainer._forget()
    monkeypatch.setattr(rig.trainer._p.writer, "init", lambda: pytest.fail("took the identity from its successor"))
    rig.log.client("other").transactional_writer("sim-trainer").init()
    rig.run_thread()

    assert isinstance(rig.error(), Fenced)


def test_a_failed_step_is_put_back_once_its_version_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Overlapped(tmp_path).begin()
    learner = rig.trainer._p.learner
    train = learner.train

    def out_of_memory(batch: TrainBatch) -> Any:
        train(batch)
        monkeypatch.setattr(learner, "train", train)
        raise StepFailed("planted: out of memory")

    rig.answer(0, 1)
    rig.step()
    monkeypatch.setattr(learner, "train", out_of_memory)
    rig.answer(2, 3)
    rig.step()
    assert (rig.trainer._learner_in_doubt, learner.steps) == (True, 2)  # type: ignore[attr-defined]
    rig.run_thread()
    rig.step()
    rig.run_thread()
    rig.step()

    assert learner.steps == 2  # type: ignore[attr-defined]
    assert [(s.version_in, s.version_out) for s in rig.steps()] == [(0, 1), (1, 2)]
    assert [told[1] for told in rig.told()] == ["trained"] * 4


def test_a_publication_that_does_not_end_stops_the_trainer(tmp_path: Path) -> None:
    rig = one_step_ahead(tmp_path)
    rig.clock.advance(rig.trainer._s.publication_limit_s + 1)

    error = rig.error()
    assert isinstance(error, StoreStuck)
    assert "version 1 has been under way for 601 s" in str(error)


def test_a_stop_lets_the_publication_end_and_waits_no_longer_than_its_limit(tmp_path: Path) -> None:
    rig = one_step_ahead(tmp_path)
    stuck: Future[Any] = Future()
    publisher = rig.trainer._publisher
    future = publisher._under_way.future  # type: ignore[union-attr]
    rig.run_thread()
    rig.trainer.close()
    assert (future.done(), publisher.head) == (True, None)
    assert [s.version_out for s in rig.steps()] == [1]

    other = one_step_ahead(tmp_path / "other")
    object.__setattr__(other.trainer._publisher._under_way, "future", stuck)
    other.trainer._publisher.close(0.0)
    assert other.trainer._publisher.head is None


def test_the_seconds_behind_the_compute_stand_in_the_record_of_the_next_step(tmp_path: Path) -> None:
    rig = one_step_ahead(tmp_path)
    rig.run_thread()
    rig.step()
    rig.run_thread()
    rig.step()

    found = [step.metrics.get("trainer/publication_behind_seconds") for step in rig.steps()]
    assert found == [None, 2 * SAVE_S]


def test_the_run_ends_when_its_last_version_is_committed(tmp_path: Path) -> None:
    rig = one_step_ahead(tmp_path, versions=2)
    for _ in range(4):
        rig.run_thread()
        rig.step()
    rig.wait(rig.trainer._s.last_switch_wait_s + 1)

    assert rig.trainer.finished
    assert [s.version_out for s in rig.steps()] == [1, 2]


def test_the_same_log_gives_the_same_weights_with_and_without_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainBatch, "digest", property(content_digest))
    found = {}
    for name, executor in (("none", None), ("at once", InlineExecutor()), ("behind", "its own")):
        rig = Overlapped(tmp_path / name).begin()
        if executor != "its own":
            rig.trainer._p.executor = executor  # type: ignore[assignment]
        for positions in ((0, 1, 2, 3), (4, 5)):
            rig.answer(*positions)
            for _ in range(4):
                rig.step()
                rig.run_thread()
        rig.step()
        assert [s.version_out for s in rig.steps()] == [1, 2, 3]
        found[name] = final_weights(rig.world)

    assert len(set(found.values())) == 1, found


def test_a_step_tells_the_parts_of_a_save_that_is_over_the_one_before_where_it_runs_behind(tmp_path: Path) -> None:
    rig = Overlapped(tmp_path).begin()
    rig.trainer._p.publication.last_phase_s = {"write": 3.0}
    rig.answer(0, 1)
    rig.step()
    rig.run_thread()
    rig.step(1)

    assert rig.steps()[0].phase_s["checkpoint_write"] == 3.0
    assert {"write", "hash", "publish"} <= set(rig.trainer._p.publication.last_phase_s)
    assert rig.trainer._p.publication.last_phase_s["write"] != 3.0
