"""Where a version comes from and what came of it; the tree of a run with branches."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from consumers.offline.lineage import read_lineage
from consumers.offline.lineage.tree import tree_dot, tree_json, tree_lines, tree_order
from consumers.offline.lineage.version import _line_words, version_lineage
from schemas import policy_events as ev
from schemas.errors import IllegalState, RangeMissing, UsageError
from schemas.topics import TopicName, topic
from tests.fakes.tiny_forge import Forge
from tests.fakes.tiny_run import TinyRun
from tests.fakes.tiny_values import RUN

SECOND = ["tiny/p000003/e0/a0", "tiny/p000001/e0/a1"]


def branched(folder: Path) -> TinyRun:
    """0 <- 1 <- 2 <- 3, and 4 <- 5 from version 1 on; 2 is pinned, 0 retired."""
    run = TinyRun(folder, end=False)
    published = [e.event for e in run.run_log().policy() if isinstance(e.event, ev.VersionPublished)]
    run.append_event(ev.BranchStarted(run=RUN, at_us=1, from_version=1))
    run.append_event(published[1].model_copy(update={"version": 4, "parent": 1}))
    run.append_event(published[2].model_copy(update={"version": 5, "parent": 4, "depth": 2}))
    run.append_event(ev.VersionPinned(run=RUN, at_us=1, version=2, reason="best"))
    run.append_event(ev.VersionRetired(run=RUN, at_us=1, version=0, rule="keep=2"))
    return run


def test_a_version_is_told_from_its_step_to_its_parents_and_what_was_sampled_by_it(tmp_path: Path) -> None:
    told = version_lineage(TinyRun(tmp_path).run_log(), 2)
    facts = json.loads(told.to_json())

    assert (facts["version"], facts["parent"], facts["status"], facts["children"]) == (2, 1, "was_live", [3])
    assert [parent["version"] for parent in facts["parents"]] == [1, 0]
    assert facts["step"]["version_in"] == 1
    assert (facts["step"]["config_digest"], facts["step"]["code_revision"]) == ("c0nf19", "r")
    assert facts["step"]["groups"] == SECOND
    assert [group["group_id"] for group in facts["sources"]] == SECOND
    assert facts["sources"][0] == {
        "group_id": SECOND[0], "trained": 2, "replayed": 0, "policy_lag": 1, "rewards": [2.0, 0.0],
        "sampled_by": {"g0/i1": [0]},
    }  # fmt: skip
    assert facts["sampled_under"] == {"0": 4}
    assert facts["trained_on_its_samples"] == {"3": 4}
    proof = next(iter(facts["workers"]["g1/i1"].values()))
    assert (proof["version"], proof["switch"], proof["is_legal"]) == (0, "s0", True)
    assert [own["worker"] for own in facts["own_proofs"]] == ["g0", "g1"]
    assert facts["life"]["followed_by"] == 3
    for words in (
        "version 2 of run tiny: depth 2, was_live",
        "step from version 1 on 4 trajectories of 2 groups; ledger@",
        "configuration c0nf19..., code r",
        f"{SECOND[0]}: 2 rows, lag 1, mean reward 1; g0/i1 under version 0",
        "sampled by g1/i1 under version 0: proof policy@",
        "parents: 1 <- 0",
        "versions trained on what it sampled: 3 (4 rows)",
        "for 4.000 s until version 3",
    ):
        assert words in told.text()


def test_version_0_has_no_parent_and_no_step(tmp_path: Path) -> None:
    told = version_lineage(TinyRun(tmp_path).run_log(), 0)

    assert (told.parents, told.node.step, told.groups) == ([], None, [])
    assert told.trained_on_its_samples == {1: 4, 2: 4}
    assert "none: it is the first" in told.text()


def test_a_branch_start_says_whose_weights_it_has(tmp_path: Path) -> None:
    run = branched(tmp_path)

    start, after = version_lineage(run.run_log(), 4), version_lineage(run.run_log(), 5)

    assert "the weights of version 1 under a new number" in start.text()
    assert "parents: 4 (branch start) <- 1 <- 0" in after.text()
    assert version_lineage(run.run_log(), 1).children == [2, 4]
    retired = version_lineage(run.run_log(), 0).text()
    assert "depth 0, retired" in retired
    assert "by the rule keep=2" in retired


def test_the_tree_shows_the_line_to_the_newest_and_branches_indented_where_they_left(tmp_path: Path) -> None:
    lineage = read_lineage(branched(tmp_path).run_log())

    assert tree_order(lineage) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 0), (5, 0)]
    lines = tree_lines(lineage)
    assert lines[0] == "run tiny: 6 versions, newest 5, live 3"
    assert lines[1].startswith("   0  first, depth 0, retired")
    assert lines[3].startswith("  |   2  <- 1, depth 2, was_live, pinned, 2 groups, 4 trajectories, lag up to 1")
    assert "branch start" in lines[5]
    assert "live after 2.0 s" in lines[4]


def test_the_tree_as_json_and_as_a_graph(tmp_path: Path) -> None:
    lineage = read_lineage(branched(tmp_path).run_log())

    content = json.loads(tree_json(lineage))
    dot = tree_dot(lineage).splitlines()

    assert [one["version"] for one in content["versions"]] == [0, 1, 2, 3, 4, 5]
    assert [one["version"] for one in content["versions"] if one["is_pinned"]] == [2]
    assert (dot[0], dot[-1]) == ('digraph "tiny" {', "}")
    assert "  1 -> 4 [style=dashed];" in dot
    assert '  1 -> 2 [label="4"];' in dot
    assert any(line.startswith("  2 [") and "peripheries=2" in line for line in dot)
    assert any(line.startswith("  3 [") and "palegreen" in line for line in dot)


def test_a_long_chain_is_drawn_without_recursion(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    last = [e.event for e in run.run_log().policy() if isinstance(e.event, ev.VersionPublished)][-1]
    for version in range(4, 1_500):
        run.append_event(last.model_copy(update={"version": version, "parent": version - 1, "depth": version}))

    assert [version for version, _ in tree_order(read_lineage(run.run_log()))] == list(range(1_500))


def test_an_unknown_version_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="version 9: run tiny has versions 0 to 3"):
        version_lineage(TinyRun(tmp_path).run_log(), 9)


def test_what_retention_removed_is_a_note_and_the_ledger_still_names_the_groups(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    decision = next(d for v, d in Forge(run).trained() if v == 2)
    assert decision.partition is not None
    run.log.drop_before(topic(RUN, TopicName.TRAJECTORIES), decision.partition, 50)

    told = version_lineage(run.run_log(), 2)

    assert [group.group_id for group in told.groups] == SECOND
    assert "rows not read" in told.text()
    assert "retention removed trajectories[" in told.text()


@pytest.mark.parametrize("name", [TopicName.POLICY, TopicName.LEDGER])
def test_without_the_start_of_policy_or_ledger_there_is_one_message(tmp_path: Path, name: TopicName) -> None:
    run = TinyRun(tmp_path)
    run.log.drop_before(topic(RUN, name), 0, 2)

    with pytest.raises(RangeMissing, match=rf"tiny.{name.value}\[0\]: records 0-1 are no longer in the log"):
        read_lineage(run.run_log())


def test_decisions_of_a_newer_schema_version_are_one_message(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    record = Forge(run).newer(TopicName.LEDGER, b"decisions/2.0")

    with pytest.raises(IllegalState) as caught:
        version_lineage(run.run_log(), 1)

    assert str(caught.value).startswith(f"tiny.ledger[0]@{record.offset}: ")
    assert "'decisions/2.0', this build knows decisions/1.x; upgrade the reader" in str(caught.value)


def test_a_long_line_of_parents_is_told_by_its_ends() -> None:
    nodes = [SimpleNamespace(version=v, is_branch_start=v == 7) for v in (9, 8, 7, 3, 2, 1, 0)]
    assert _line_words(nodes) == "9 <- 8 <- 7 (branch start) <- 3 <- ... <- 0"  # type: ignore[arg-type]
