"""Which older version training goes on from: a wish, a version without state, or none."""

from __future__ import annotations

import pytest

from consumers.trainer.branching import BranchWish, branch_origin
from consumers.trainer.dead_letters import poisoned_group
from infra.ports import Record
from schemas import policy_events as ev
from schemas.errors import ConfigError, IllegalState, InvalidRecord
from schemas.headers import dead_letter_headers
from tests.fakes.log_script import G0, RUN, PolicyScript, running, sha


def without_state(script: PolicyScript, version: int) -> None:
    script.tell(
        ev.VersionPublished(
            run=RUN, at_us=0, version=version, parent=version - 1 if version else None, depth=version,
            manifest_uri=f"demo/a{version}/manifest.json", manifest_sha256=sha(version), bytes=1,
            optimizer_step=version, oldest_open_request=0, has_state=False,
        )
    )  # fmt: skip


def test_without_a_wish_training_goes_on_from_the_newest_version() -> None:
    script, _ = running(G0, versions=3)

    assert branch_origin(script.fold, 2, None) is None


def test_a_wish_counts_only_while_the_version_it_was_made_for_is_the_newest() -> None:
    script, _ = running(G0, versions=3)
    wish = BranchWish(from_version=1, when_newest=2)

    assert branch_origin(script.fold, 2, wish) == 1
    script.branched(1)
    script.published(3, parent=1, depth=1)
    assert branch_origin(script.fold, 3, wish) is None, "a restarted trainer must not branch again"


def test_a_newest_version_without_optimizer_state_goes_back_to_the_last_one_that_has_it() -> None:
    script, _ = running(G0, versions=3)
    without_state(script, 3)
    without_state(script, 4)

    assert branch_origin(script.fold, 4, None) == 2


def test_a_run_without_any_state_stops_loudly() -> None:
    script = PolicyScript()
    script.started()
    without_state(script, 0)

    with pytest.raises(IllegalState, match="no version was saved with optimizer state"):
        branch_origin(script.fold, 0, None)


@pytest.mark.parametrize("from_version", [1, 7])
def test_a_wish_for_a_retired_or_unknown_version_names_what_can_be_used(from_version: int) -> None:
    script, _ = running(G0, versions=4)
    script.retired(1)

    with pytest.raises(ConfigError, match=f"version {from_version}.*the newest one that can be used is 3"):
        branch_origin(script.fold, 3, BranchWish(from_version=from_version, when_newest=3))


def test_a_pinned_version_and_the_last_with_state_cannot_be_retired() -> None:
    script, _ = running(G0, versions=4)
    script.tell(ev.VersionPinned(run=RUN, at_us=0, version=1, reason="best"))
    pinned = script.retired(1)
    script.tell(ev.VersionUnpinned(run=RUN, at_us=0, version=1))
    unpinned = script.retired(1)
    without_state(script, 4)
    last_with_state = script.retired(3)

    assert pinned is not None
    assert pinned.reason == "pinned"
    assert unpinned is None
    assert last_with_state is not None


def dead_letter(topic: str, code: str) -> Record:
    headers = dead_letter_headers((), topic=topic, partition=3, offset=9, error=InvalidRecord(code, "why"))
    key = b"demo/p000001/e0/a0"
    return Record(topic="demo.deadletters", partition=0, offset=0, key=key, value=b"", headers=headers, timestamp_ms=0)


def test_only_a_request_given_up_as_poison_closes_its_group() -> None:
    assert poisoned_group(dead_letter("demo.prompts", "poison_prompt"), RUN) == "demo/p000001/e0/a0"
    assert poisoned_group(dead_letter("demo.prompts", "not_arrow"), RUN) is None
    assert poisoned_group(dead_letter("demo.trajectories", "poison_prompt"), RUN) is None
