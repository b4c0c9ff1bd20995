"""Reads and makes the broker's access rules for the roles of a run. Adds only: no rule is ever taken away here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)

from infra.access_rights import Grant, Permission, Resource
from infra.kafka_clients import KafkaSettings, build, common_config, explain
from schemas.errors import DriftlogError, EnvironmentMissing, LogUnavailable

_TYPES: dict[Resource, ResourceType] = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional_id": ResourceType.TRANSACTIONAL_ID,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_ANY_HOST = "*"
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of some users."""

    permissions: frozenset[Permission]
    """what is allowed by full name, from every host"""
    others: tuple[tuple[str, str], ...]
    """(resource name, rule in words): denials, patterns, rules for one host or of other resources"""


class KafkaAcls:
    """The access rules of one broker. Needs a user that may alter the cluster."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._where = settings.bootstrap_servers
        self._client = build(KafkaAdminClient, settings, common_config(settings))

    def rules_of(self, principals: Iterable[str]) -> Rules:
        """What these users may do now. EnvironmentMissing: the broker keeps no rules, or this user may not ask."""
        allowed: set[Permission] = set()
        others: list[tuple[str, str]] = []
        for principal in sorted(set(principals)):
            for acl in self._described(principal):
                permission = _permission(acl)
                if permission is not None:
                    allowed.add(permission)
                else:
                    others.append((acl.resource_pattern.resource_name, _words(acl)))
        return Rules(permissions=frozenset(allowed), others=tuple(others))

    def create(self, permissions: Sequence[Permission], *, limit_s: float = 10.0) -> None:
        """Add them, and wait until they hold. EnvironmentMissing: refused; LogUnavailable: not in force in limit_s."""
        if not permissions:
            return
        what = f"create access rules at {self._where}"
        try:
            answer = self._client.create_acls([_acl(permission) for permission in permissions])
        except kafka_errors.KafkaError as error:
            raise self._explained(error, what) from error
        if answer["failed"]:
            raise self._explained(
                answer["failed"][0](), f"{what}: {len(answer['failed'])} of {len(permissions)} refused"
            )
        # The answer comes before the authorizer knows: whoever started now would be refused.
        deadline_s = time.monotonic() + limit_s
        while missing := set(permissions) - self.rules_of(one.principal for one in permissions).permissions:
            if time.monotonic() > deadline_s:
                raise LogUnavailable(f"{what}: {len(missing)} rules are not in force after {limit_s:g} s")
            time.sleep(_LOOK_AGAIN_S)

    def close(self) -> None:
        """Safe to call twice."""
        self._client.close()

    def _described(self, principal: str) -> list[Any]:
        everything = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
        wanted = ACLFilter(principal, None, ACLOperation.ANY, ACLPermissionType.ANY, everything)
        try:
            found, _ = self._client.describe_acls(wanted)
        except kafka_errors.KafkaError as error:
            raise self._explained(error, f"list access rules at {self._where}") from error
        return list(found)

    def _explained(self, error: BaseException, what: str) -> DriftlogError:
        if isinstance(error, kafka_errors.SecurityDisabledError):
            return EnvironmentMissing(
                f"{what}: this broker keeps no access rules, so everybody may do everything: set its "
                "authorizer.class.name to org.apache.kafka.metadata.authorizer.StandardAuthorizer first"
            )
        return explain(error, what)


def _acl(permission: Permission) -> ACL:
    grant = permission.grant
    return ACL(
        principal=permission.principal,
        host=_ANY_HOST,
        operation=ACLOperation[grant.operation.upper()],
        permission_type=ACLPermissionType.ALLOW,
        resource_pattern=ResourcePattern(_TYPES[grant.resource], grant.name, ACLResourcePatternType.LITERAL),
    )


def _permission(acl: Any) -> Permission | None:
    """None for a rule that is none of the kind made here."""
    pattern = acl.resource_pattern
    plain = (
        acl.permission_type is ACLPermissionType.ALLOW
        and acl.host == _ANY_HOST
        and pattern.pattern_type is ACLResourcePatternType.LITERAL
        and pattern.resource_name != "*"
    )
    if not plain or pattern.resource_type not in _NAMES:
        return None
    kind, operation = _NAMES[pattern.resource_type], acl.operation.name.lower()
    grant = Grant(resource=kind, name=pattern.resource_name, operation=operation)
    return Permission(principal=acl.principal, grant=grant)


def _words(acl: Any) -> str:
    pattern = acl.resource_pattern
    verb = "may" if acl.permission_type is ACLPermissionType.ALLOW else "may NOT"
    host = "" if acl.host == _ANY_HOST else f" from {acl.host}"
    kind = f"{pattern.pattern_type.name.lower()} {pattern.resource_type.name.lower()}"
    return f"{acl.principal} {verb} {acl.operation.name.lower()} {kind} {pattern.resource_name}{host}"
