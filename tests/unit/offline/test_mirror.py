"""Comparing a tracker's entries with the log's: every kind of difference is told once, in words."""

from __future__ import annotations

import pytest

from consumers.offline.mirror import Difference, compare, while_running
from consumers.projection_rows import Bookmark
from infra.mirror_entries import cut, param_values, registry_name, same_param
from tests.fakes.projected_log import BEST, PARAMS, ProjectedLog, expected_of

_LOG = {
    "run/status": "finished",
    "param/lr": "1e-3",
    "curve/reward@1 at 5 = 0.5": "",
    "version/1": "demo-v1 READY",
    "version/1/tag/depth": "1",
    "model_output/1": "1",
    "alias/live": "1",
}


def _without(*entries: str) -> dict[str, str]:
    return {entry: value for entry, value in _LOG.items() if entry not in entries}


def test_the_same_entries_have_no_difference() -> None:
    assert compare(_LOG, dict(_LOG)) == []


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (_LOG | {"version/1/tag/depth": "7"}, ["version/1/tag/depth: '7', the log says '1'"]),
        (_LOG | {"version/2": "demo-v2 READY", "version/2/tag/depth": "2"},
         ["version/2: not from this log ('demo-v2 READY')"]),
        (_without("version/1", "version/1/tag/depth", "model_output/1"),
         ["version/1: missing (the log says 'demo-v1 READY')"]),
        (_without("alias/live"), ["alias/live: missing (the log says '1')"]),
        (_without("curve/reward@1 at 5 = 0.5") | {"curve/reward@1 at 5 = 0.6": ""},
         ["curve/reward@1 at 5 = 0.5: missing", "curve/reward@1 at 5 = 0.6: not from this log"]),
        (_LOG | {"param/lr": "1e-4"}, ["param/lr: '1e-4', the log says '1e-3'"]),
    ],
)  # fmt: skip
def test_each_difference_is_told_once(actual: dict[str, str], words: list[str]) -> None:
    assert [difference.text() for difference in compare(_LOG, actual)] == words


def test_a_parameter_that_was_cut_is_the_same_and_another_one_is_not() -> None:
    long = "p" * 9_000
    assert compare({"param/prompt": long}, {"param/prompt": cut(long, 500, "params/prompt.txt")}) == []
    assert len(compare({"param/prompt": long}, {"param/prompt": cut("q" * 9_000, 500)})) == 1
    assert not same_param("p" * 500, long)


def test_a_long_value_is_shortened_in_words_and_whole_in_the_difference() -> None:
    difference = Difference(entry="file/ledger/a.csv", expected="x" * 5_000, actual=None)
    assert len(difference.text()) < 300
    assert "(5000 characters)" in difference.text()


def test_while_a_projector_is_at_work_what_follows_later_is_not_compared() -> None:
    assert while_running(_LOG | {"file/ledger/a": "", "registry/1": "x"}) == _without("run/status", "alias/live")


def test_what_a_bookmark_does_not_cover_is_not_expected_and_is_counted() -> None:
    log = ProjectedLog()
    log.full_step(1, at_s=1)
    middle = expected_of(log).bookmark
    log.full_step(2, at_s=2)
    log.raw("demo.ledger", b"{broken")

    expected = expected_of(log, up_to=middle)
    assert expected.bookmark == middle
    assert "version/2" not in expected.mirror
    # VersionPublished, SwitchStarted, VersionLoaded, VersionActivated; StepCompleted (its decisions come with it).
    assert expected.records_beyond == 5
    assert expected_of(log).records_beyond == 0
    assert expected_of(log, up_to=Bookmark()).mirror["run/status"] == "killed"


def test_parameters_of_several_segments_are_told_apart() -> None:
    assert param_values([{"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "1"}]) == {"a": ["1", "2", "1"], "b": ["x"]}
    assert (PARAMS[0], BEST) == ({"lr": "1e-3"}, "critic/rewards/mean")


def test_names_of_the_registry_hold_no_character_that_it_refuses() -> None:
    assert registry_name("team/a:b", "run@1") == "team_a_b.run_1"
