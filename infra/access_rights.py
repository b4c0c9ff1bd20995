"""What each service may do to the log: the one list from which access rules are made, shown and checked.

Guarantee: a service that has its grants and no others does its whole work. Pure; knows no Kafka client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from schemas.errors import ConfigError
from schemas.ids import RunId
from schemas.topics import TopicName, topic

Resource = Literal["topic", "group", "transactional_id"]
ALL_TOPICS = frozenset(TopicName)


class Role(StrEnum):
    """Who meets the log. Each may be a user of its own."""

    GENERATOR = "generator"
    TRAINER = "trainer"
    COORDINATOR = "coordinator"
    EVALUATOR = "evaluator"
    PROJECTOR = "projector"
    READER = "reader"
    """every command that only reads: audit, replay, lineage, report ..."""
    OPERATOR = "operator"
    """makes topics, reads everything, pins versions; with the other roles' rights as well it is `driftlog up`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What one role does, before it is spelled as grants. Whatever is not read or written may still be seen to exist:
    a service that starts waits for all topics of its run."""

    reads: frozenset[TopicName]
    writes: frozenset[TopicName] = frozenset()
    asks_limits: frozenset[TopicName] = frozenset()
    """asks how large a record of the topic may be, before it sends one"""
    creates: bool = False
    group: str | None = None
    """of consumers, without the run"""
    transactional_id: str | None = None
    """without the run"""


def _topics(*names: TopicName) -> frozenset[TopicName]:
    return frozenset(names)


_T = TopicName
RIGHTS: Mapping[Role, Rights] = {
    Role.GENERATOR: Rights(
        reads=_topics(_T.PROMPTS, _T.POLICY, _T.WORKERS),
        # policy: that it joined, loaded, left. deadletters: a request it cannot read.
        writes=_topics(_T.TRAJECTORIES, _T.POLICY, _T.WORKERS, _T.DEADLETTERS),
        asks_limits=_topics(_T.TRAJECTORIES, _T.POLICY, _T.WORKERS, _T.DEADLETTERS),
        group="generators",
    ),
    Role.TRAINER: Rights(
        reads=_topics(_T.POLICY, _T.LEDGER, _T.TRAJECTORIES, _T.DEADLETTERS),
        writes=_topics(_T.PROMPTS, _T.POLICY, _T.LEDGER, _T.SCORES, _T.DEADLETTERS),
        group="trainer",
        transactional_id="trainer",
    ),
    Role.COORDINATOR: Rights(
        reads=_topics(_T.POLICY, _T.WORKERS), writes=_topics(_T.POLICY), transactional_id="coordinator"
    ),
    Role.EVALUATOR: Rights(
        reads=_topics(_T.POLICY, _T.EVALUATIONS),
        writes=_topics(_T.EVALUATIONS),
        asks_limits=_topics(_T.EVALUATIONS),
    ),
    Role.PROJECTOR: Rights(reads=_topics(_T.POLICY, _T.LEDGER, _T.EVALUATIONS)),
    Role.READER: Rights(reads=ALL_TOPICS),
    Role.OPERATOR: Rights(reads=ALL_TOPICS, writes=_topics(_T.POLICY), asks_limits=ALL_TOPICS, creates=True),
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Grant:
    """One operation on one resource, under its full name.

    >>> str(Grant(resource="topic", name="demo.policy", operation="read"))
    'read topic demo.policy'
    """

    resource: Resource
    name: str
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} {self.resource} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Permission:
    """A grant to somebody.

    >>> grant = Grant(resource="group", name="demo-trainer", operation="read")
    >>> str(Permission(principal="User:trainer", grant=grant))
    'User:trainer may read group demo-trainer'
    """

    principal: str
    """as the broker names it: User:NAME, or User:CN=... for a client certificate"""
    grant: Grant

    def __str__(self) -> str:
        return f"{self.principal} may {self.grant}"


def grants(role: Role, run: RunId) -> tuple[Grant, ...]:
    """Everything the role needs for one run, sorted; each name in full, no patterns."""
    rights = RIGHTS[role]
    found: list[Grant] = []

    def allow(names: Iterable[TopicName], operation: str) -> None:
        found.extend(Grant(resource="topic", name=topic(run, name), operation=operation) for name in names)

    allow(rights.reads, "read")
    allow(rights.writes, "write")
    allow(ALL_TOPICS - rights.reads - rights.writes, "describe")  # read and write imply it
    allow(rights.asks_limits, "describe_configs")
    allow(ALL_TOPICS if rights.creates else (), "create")
    if rights.group is not None:
        found.append(Grant(resource="group", name=f"{run}-{rights.group}", operation="read"))
    if rights.transactional_id is not None:
        found.append(Grant(resource="transactional_id", name=f"{run}-{rights.transactional_id}", operation="write"))
    return tuple(sorted(found))


def permissions(principals: Mapping[Role, Iterable[str]], run: RunId) -> tuple[Permission, ...]:
    """Who may do what, sorted, each once: one principal may have several roles."""
    wanted = {
        Permission(principal=principal, grant=grant)
        for role, names in principals.items()
        for principal in names
        for grant in grants(role, run)
    }
    return tuple(sorted(wanted))


def belongs_to(name: str, run: RunId) -> bool:
    """Whether a resource of the broker is one of this run's.

    >>> belongs_to("demo.policy", RunId("demo")), belongs_to("demo2.policy", RunId("demo"))
    (True, False)
    """
    own = {grant.name for role in Role for grant in grants(role, run)}
    return name in own


def principals_of(words: Iterable[str]) -> dict[Role, list[str]]:
    """ROLE=User:NAME, repeated. ConfigError says which is not written like that.

    >>> principals_of(["trainer=User:CN=trainer,O=us"])
    {<Role.TRAINER: 'trainer'>: ['User:CN=trainer,O=us']}
    """
    found: dict[Role, list[str]] = {}
    for word in words:
        role, separator, principal = word.partition("=")
        if role not in set(Role) or not separator:
            raise ConfigError(f"--principal {word}: write it as ROLE=User:NAME; roles are {', '.join(Role)}")
        if not principal.startswith("User:") or principal == "User:":
            raise ConfigError(f"--principal {word}: {principal!r} is no user as the broker names it: User:NAME")
        if principal == "User:*":
            raise ConfigError(f"--principal {word}: User:* is everybody who can reach the broker: name a user")
        found.setdefault(Role(role), []).append(principal)
    return found
