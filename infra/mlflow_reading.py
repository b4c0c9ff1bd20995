"""Reads everything of a run back from MLflow, in the form that can be compared with the log.

Reads only. What belongs to MLflow (ids, its own stamps, tags of other tools, notes of people) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infra import mirror_entries as entries
from infra.mirror_entries import ALIASES, BOOKMARK_TAG, PREFIX
from infra.mlflow_access import MlflowAccess, MlflowSettings, without_password
from infra.mlflow_models import PAGE
from infra.mlflow_registry import MLFLOW_RUN_TAG, registry_versions
from infra.mlflow_tracker import LOG_TAG, RUN_TAG, is_set_aside
from schemas.errors import ConfigError

_FILES = "ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMirror:
    """What MLflow holds of one run."""

    mlflow_run: str
    bookmark: str | None
    is_running: bool
    """the registry and the open ledger file may be some seconds behind"""
    entries: dict[str, str] = field(default_factory=dict)


def read_mirror(settings: MlflowSettings, run: str, log_id: str) -> ReadMirror:
    """The MLflow run of that name and log. ConfigError says what is missing."""
    access = MlflowAccess(settings)
    with access.talking("read"):
        access.open(create=False)
        found = _find(access, run, log_id)
        run_id = found.info.run_id
        models = list(_models(access, run_id))
        names = {model.model_id: _version_of(model) for model in models}
        read = dict(_run_entries(access, found, names))
        for model in models:
            _add_model(read, model, names)
        read |= dict(_registry_entries(access, run, run_id))
        read |= _files(access, run_id)
        tags = found.data.tags
        return ReadMirror(
            mlflow_run=run_id, bookmark=tags.get(BOOKMARK_TAG), is_running=found.info.status == "RUNNING", entries=read
        )


def _find(access: MlflowAccess, run: str, log_id: str) -> Any:
    runs = access.find_runs(f"tags.`{RUN_TAG}` = '{run}'")
    active = [entry for entry in runs if entry.info.lifecycle_stage == "active"]
    ours = [entry for entry in active if entry.data.tags.get(LOG_TAG, log_id) == log_id and not is_set_aside(entry)]
    if not ours:
        where = f"experiment {access.settings.experiment!r} at {without_password(access.settings.tracking_uri)}"
        why = "what is there was deleted, or is of another log" if runs else "nothing of it is there"
        raise ConfigError(f"no run {run!r} in {where} ({why}): make it with `driftlog mlflow rebuild`")
    return access.client.get_run(ours[0].info.run_id)


def _models(access: MlflowAccess, run_id: str) -> Iterator[Any]:
    token: str | None = None
    while True:
        page = access.client.search_logged_models(
            [access.experiment_id], filter_string=f"source_run_id = '{run_id}'", max_results=PAGE, page_token=token
        )
        yield from page
        token = page.token
        if not token:
            return


def _run_entries(access: MlflowAccess, run: Any, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in run.data.tags.items():
        if key.startswith(PREFIX) and key not in entries.PLACE_TAGS:
            yield entries.run_tag(key), value
    yield "run/name", str(run.info.run_name)
    yield "run/status", run.info.status.lower()
    yield "run/started_ms", str(run.info.start_time)
    if run.info.status in ("FINISHED", "FAILED"):
        yield "run/ended_ms", str(run.info.end_time)
    for key, value in run.data.params.items():
        yield entries.param(key), value
    for key in run.data.metrics:
        for point in access.client.get_metric_history(run.info.run_id, key):
            yield entries.point(key, point.step, point.timestamp, point.value), ""
    for used in run.inputs.dataset_inputs:
        yield f"dataset/{used.dataset.name}", f"{used.dataset.source} {used.dataset.profile}"
    # A model that was deleted is missing as such; what pointed at it is not told again.
    for model in run.inputs.model_inputs:
        if model.model_id in names:
            yield f"model_input/{names[model.model_id]}", ""
    for model in run.outputs.model_outputs:
        if model.model_id in names:
            yield f"model_output/{names[model.model_id]}", str(model.step)


def _add_model(read: dict[str, str], model: Any, names: dict[str, str]) -> None:
    version = names[model.model_id]
    if entries.version_name(version) in read:  # a second one of the same version: never ours
        version = f"{version} (again: {model.model_id})"
    read[entries.version_name(version)] = f"{model.name} {getattr(model.status, 'value', model.status)}"
    for key, there in model.tags.items():
        if not key.startswith(PREFIX):
            continue
        value = there
        if key == f"{PREFIX}parent_model_id":
            value = f"model of version {names[value]}" if value in names else "a model that is gone"
        read[entries.version_tag(version, key)] = value
    for point in model.metrics or ():
        if math.isfinite(point.value):
            read[entries.version_point(version, point.key, point.step, point.timestamp, point.value)] = ""


def _registry_entries(access: MlflowAccess, run: str, run_id: str) -> Iterator[tuple[str, str]]:
    name = entries.registry_name(access.settings.experiment, run)
    try:
        registered = access.client.get_registered_model(name)
    except access.mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return
    there = registry_versions(access.client, name)
    ours = {number: entry for number, entry in there.items() if entry.tags.get(MLFLOW_RUN_TAG) == run_id}
    seen: set[str] = set()
    for number, entry in sorted(ours.items(), key=lambda pair: int(pair[0])):
        version = entry.tags.get(f"{PREFIX}version", "")
        place = f"registry/{version}" if version not in seen else f"registry/{version} (again: {number})"
        seen.add(version)
        yield place, f"{entry.source} {entry.tags.get(f'{PREFIX}manifest_sha256', '')}"
    for alias in ALIASES:
        number = str(registered.aliases[alias]) if alias in registered.aliases else ""
        if number in ours:
            yield f"alias/{alias}", ours[number].tags.get(f"{PREFIX}version", "")
        elif number:
            yield f"alias/{alias}", f"registry version {number}, which is not of this run"


def _files(access: MlflowAccess, run_id: str) -> dict[str, str]:
    found: Iterable[Any] = access.client.list_artifacts(run_id, _FILES)
    with TemporaryDirectory() as scratch:
        return {
            f"file/{file.path}": Path(access.client.download_artifacts(run_id, file.path, scratch)).read_text("utf-8")
            for file in found
        }


def _version_of(model: Any) -> str:
    return str(model.tags.get(f"{PREFIX}version", f"of {model.model_id}"))
