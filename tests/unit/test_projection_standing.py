"""Which versions are promoted, whatever way the log came."""

from __future__ import annotations

import random

import pytest

from consumers.projection import Projection
from infra.ports import Record
from infra.tracker_port import Promotions
from schemas.policy_events import VersionPinned, VersionRetired, VersionUnpinned
from tests.fakes.projected_log import RUN, ProjectedLog
from tests.fakes.virtual_clock import START_US

BEST = "critic/rewards/mean"


def _log() -> ProjectedLog:
    log = ProjectedLog()
    log.switch(0, at_s=0)
    for version, reward in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.5)):
        log.full_step(version, at_s=version, reward=reward)
    return log


def _promotions(records: list[Record], best_metric: str = BEST) -> Promotions:
    projection = Projection(RUN, best_metric=best_metric)
    for record in records:
        projection.apply(record)
    return projection.promotions()


def test_the_live_and_the_best_version_have_aliases_and_their_checkpoints() -> None:
    assert _promotions(_log().records()) == Promotions(
        aliases={"live": 4, "best": 2},
        sources={2: ("demo/a2/manifest.json", f"{2:064x}"), 4: ("demo/a4/manifest.json", f"{4:064x}")},
    )


def test_before_anything_is_live_or_scored_nothing_is_promoted() -> None:
    assert _promotions(ProjectedLog().records()) == Promotions()
    assert _promotions(_log().records(), best_metric="").aliases == {"live": 4}


def test_a_version_whose_weights_are_gone_is_never_the_best() -> None:
    log = _log()
    log.policy(VersionRetired(run=RUN, at_us=START_US, version=2, rule="keep=2"))

    # Of equals the newest.
    assert _promotions(log.records()).aliases["best"] == 4


def test_an_evaluation_counts_more_than_a_metric_of_training() -> None:
    log = _log()
    log.evaluation(1, 1.0, 0.0, None)
    assert _promotions(log.records()).aliases["best"] == 1

    log.evaluation(3, 0.75)
    assert _promotions(log.records()).aliases["best"] == 3

    log.evaluation(3, 0.0)
    assert _promotions(log.records()).aliases["best"] == 1


def test_a_metric_that_is_not_finite_makes_no_version_the_best() -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=1, reward=0.1)
    log.step(2, at_s=2, metrics={}, nonfinite=(BEST,))
    log.publish(2, at_s=2)

    assert _promotions(log.records()).aliases["best"] == 1


def test_a_pinned_version_is_promoted_until_it_is_unpinned() -> None:
    log = _log()
    log.policy(VersionPinned(run=RUN, at_us=START_US, version=1, reason="a paper names it"))
    pinned = _promotions(log.records())
    assert (pinned.pinned, pinned.versions) == ((1,), (1, 2, 4))

    log.policy(VersionUnpinned(run=RUN, at_us=START_US, version=1))
    assert _promotions(log.records()).versions == (2, 4)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_the_topics_are_read_changes_nothing(seed: int) -> None:
    log = _log()
    log.evaluation(3, 0.75)
    log.evaluation(1, 0.5)
    queues = {name: [record for record in log.records() if record.topic == name] for name in
              ("demo.policy", "demo.ledger", "demo.evaluations")}  # fmt: skip
    chance = random.Random(seed)
    mixed: list[Record] = []
    while left := [name for name, queue in queues.items() if queue]:
        mixed.append(queues[chance.choice(left)].pop(0))

    assert _promotions(mixed) == _promotions(log.records())
