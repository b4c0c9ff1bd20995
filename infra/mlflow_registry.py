"""The run's registered model: one registry version for each version that is live, best or pinned, and the aliases.

Brought to a wanted state, whatever it was: missing entries are made, aliases set, entries that nothing names any more
are removed, unless somebody gave them an alias, a tag or a description of their own.
"""

from __future__ import annotations

import logging
from typing import Any

from infra.logs import event
from infra.mirror_entries import ALIASES, PREFIX, registry_name, registry_source
from infra.mlflow_access import MlflowAccess
from infra.mlflow_models import MlflowModels
from infra.tracker_port import Promotions

log = logging.getLogger(__name__)

MLFLOW_RUN_TAG = f"{PREFIX}mlflow_run"


class MlflowRegistry:
    """The registered model of one run."""

    def __init__(self, access: MlflowAccess, run: str, run_id: str) -> None:
        self._access = access
        self._run = run
        self._run_id = run_id
        self._name = registry_name(access.settings.experiment, run)
        self._is_foreign = False

    def bring_to(self, wanted: Promotions, models: MlflowModels) -> None:
        """Make the registry say this."""
        registered = self._registered(create=bool(wanted.versions))
        if registered is None:
            return
        there = registry_versions(self._access.client, self._name)
        numbers: dict[int, str] = {}
        """policy version -> registry version"""
        for number, entry in sorted(there.items(), key=lambda pair: int(pair[0])):
            version = entry.tags.get(f"{PREFIX}version", "")
            if version.isdecimal() and entry.tags.get(MLFLOW_RUN_TAG) == self._run_id:
                numbers.setdefault(int(version), number)
        for version in wanted.versions:
            model_id = models.find(version)
            if version not in numbers and model_id is not None:
                numbers[version] = self._make(version, model_id, *wanted.sources[version])
        for alias in ALIASES:
            self._move(alias, registered.aliases.get(alias), numbers.get(wanted.aliases.get(alias, -1)), there, wanted)
        kept = {numbers[version] for version in wanted.versions if version in numbers}
        for number, entry in there.items():
            if number not in kept and _is_ours_alone(entry, registered.aliases):
                self._access.client.delete_model_version(self._name, number)

    def _registered(self, *, create: bool) -> Any:
        """The registered model; None when there is none and none is wanted, or when it is somebody else's."""
        client, mlflow = self._access.client, self._access.mlflow
        try:
            found = client.get_registered_model(self._name)
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            if not create:
                return None
            tags = {f"{PREFIX}run": self._run, f"{PREFIX}experiment": self._access.settings.experiment}
            found = client.create_registered_model(self._name, tags=tags)
        if found.tags.get(f"{PREFIX}run") == self._run:
            return found
        if not self._is_foreign:
            self._is_foreign = True
            event(log, "registry_name_is_taken", level=logging.WARNING, registered_model=self._name)
        return None

    def _make(self, version: int, model_id: str, manifest_uri: str, manifest_sha256: str) -> str:
        made = self._access.client.create_model_version(
            self._name,
            source=registry_source(manifest_uri),
            run_id=self._run_id,
            tags={
                f"{PREFIX}run": self._run,
                f"{PREFIX}version": str(version),
                f"{PREFIX}manifest_sha256": manifest_sha256,
                f"{PREFIX}model_id": model_id,
                MLFLOW_RUN_TAG: self._run_id,
            },
            await_creation_for=0,
        )
        return str(made.version)

    def _move(self, alias: str, old: str | None, new: str | None, there: dict[str, Any], wanted: Promotions) -> None:
        if (None if old is None else str(old)) == new:
            return
        if new is None:
            self._access.client.delete_registered_model_alias(self._name, alias)
        else:
            self._access.client.set_registered_model_alias(self._name, alias, new)
        before = there[str(old)].tags.get(f"{PREFIX}version", "") if str(old) in there else ""
        event(log, "alias_moved", alias=alias, from_version=before, to_version=wanted.aliases.get(alias, ""))


def registry_versions(client: Any, name: str) -> dict[str, Any]:
    """Every registry version of the model, by its number."""
    found: dict[str, Any] = {}
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name='{name}'", max_results=200, page_token=token)
        found |= {str(entry.version): entry for entry in page}
        token = page.token
        if not token:
            return found


def _is_ours_alone(entry: Any, aliases: dict[str, Any]) -> bool:
    foreign = {str(number) for alias, number in aliases.items() if alias not in ALIASES}
    return (
        str(entry.version) not in foreign
        and not entry.description
        and f"{PREFIX}version" in entry.tags
        and all(key.startswith((PREFIX, "mlflow.")) for key in entry.tags)
    )
