"""The list of rights: who may do what, what no service may, and that the page for people says the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from driftlog.__main__ import main
from infra.access_rights import ALL_TOPICS, RIGHTS, Grant, Role, belongs_to, grants, permissions, principals_of
from schemas.errors import ConfigError
from schemas.ids import RunId
from schemas.topics import TopicName

RUN = RunId("demo")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"


def allowed(role: Role, operation: str, resource: str = "topic") -> set[str]:
    return {g.name for g in grants(role, RUN) if g.operation == operation and g.resource == resource}


def test_a_generator_writes_what_it_makes_and_nothing_that_decides() -> None:
    assert allowed(Role.GENERATOR, "write") == {"demo.trajectories", "demo.policy", "demo.workers", "demo.deadletters"}
    assert allowed(Role.GENERATOR, "read") == {"demo.prompts", "demo.policy", "demo.workers"}
    assert allowed(Role.GENERATOR, "read", "group") == {"demo-generators"}
    assert allowed(Role.GENERATOR, "write", "transactional_id") == set()


def test_the_ledger_prompts_and_scores_have_one_writer() -> None:
    for name in (TopicName.LEDGER, TopicName.PROMPTS, TopicName.SCORES):
        assert [role for role in Role if name in RIGHTS[role].writes] == [Role.TRAINER]


def test_identities_are_held_by_one_role_each() -> None:
    held = [RIGHTS[role].transactional_id for role in Role if RIGHTS[role].transactional_id is not None]
    assert sorted(held) == ["coordinator", "trainer"]


def test_readers_and_the_projector_write_nothing() -> None:
    for role in (Role.READER, Role.PROJECTOR):
        assert allowed(role, "write") == set()
        assert allowed(role, "create") == set()


def test_every_role_sees_every_topic_that_it_waits_for() -> None:
    for role in Role:
        seen = allowed(role, "read") | allowed(role, "write") | allowed(role, "describe")
        assert len(seen) == len(ALL_TOPICS)


def test_only_the_operator_makes_topics_and_nobody_deletes_or_alters() -> None:
    assert [role for role in Role if allowed(role, "create")] == [Role.OPERATOR]
    operations = {grant.operation for role in Role for grant in grants(role, RUN)}
    assert operations == {"read", "write", "describe", "describe_configs", "create"}


def test_grants_name_one_run_and_no_pattern() -> None:
    for role in Role:
        assert all(belongs_to(grant.name, RUN) and "*" not in grant.name for grant in grants(role, RUN))
    assert not belongs_to("other.policy", RUN)


def test_one_user_with_two_roles_has_each_rule_once() -> None:
    both = permissions({Role.PROJECTOR: ["User:a"], Role.EVALUATOR: ["User:a"]}, RUN)

    assert len(both) == len(set(both))
    assert {one.grant for one in both} == set(grants(Role.PROJECTOR, RUN)) | set(grants(Role.EVALUATOR, RUN))


@pytest.mark.parametrize("words", ["trainer", "boss=User:a", "trainer=a", "trainer=User:", "trainer=User:*"])
def test_a_principal_that_is_none_is_named(words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        principals_of([words])


def test_a_client_certificate_may_be_named_with_its_commas_and_equals_signs() -> None:
    assert principals_of(["trainer=User:CN=t,O=us"]) == {Role.TRAINER: ["User:CN=t,O=us"]}


def test_list_shows_what_create_would_make(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "list", "--run", "demo", "--role", "trainer", "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)
    shown = {Grant(resource=row["resource"], name=row["name"], operation=row["operation"]) for row in rows}
    assert shown == set(grants(Role.TRAINER, RUN))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create"], "name at least one user"),
        (["create", "--role", "trainer"], "--role goes with"),
        (["list", "--dry-run"], "go with `driftlog acl create`"),
        (["create", "--principal", "trainer=bob"], "'bob' is no user"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["acl", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_page_says_what_each_role_may_do() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    shown = {row[0]: tuple(set(re.findall(r"`([^`]+)`", cell)) for cell in row[1:]) for row in rows}

    def identities(role: Role) -> set[str]:
        found = {f"RUN-{RIGHTS[role].group}"} if RIGHTS[role].group else set()
        return found | ({f"RUN-{RIGHTS[role].transactional_id}"} if RIGHTS[role].transactional_id else set())

    assert shown == {
        str(role): (
            {str(name) for name in RIGHTS[role].reads},
            {str(name) for name in RIGHTS[role].writes},
            identities(role),
        )
        for role in Role
    }


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))

    assert len(named) > 15
    for file, test in named:
        assert f"def {test}(" in (PAGE.parents[1] / "tests" / file).read_text(encoding="utf-8"), test
