"""The ExperimentTracker on MLflow: one run with curves by version, one external LoggedModel a version.

The only importer of mlflow (on construction: it costs seconds). Guarantees: every call may be repeated
without a second run, model or point; non-finite numbers and over-long values never reach MLflow; every
failure leaves as TrackerUnavailable, a deleted experiment as ConfigError.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from infra.logs import event
from infra.ports import Clock
from schemas.errors import ConfigError, DriftlogError, TrackerUnavailable

log = logging.getLogger(__name__)

PREFIX = "driftlog."
BOOKMARK_TAG = f"{PREFIX}bookmark"
MODEL_TYPE = "driftlog-policy"
# MLflow's own limits: a request above them is refused whole.
_METRICS_A_BATCH = 1_000
_PARAMS_A_BATCH = 100
_TAG_CHARS = 5_000
# Newest server first; older ones refuse more than 500 or 250 characters.
_PARAM_CHARS = (6_000, 500, 250)
_MODEL_IDS_REMEMBERED = 1_000
_LOCK_WAIT_S = 60.0
_BAD_NAME_CHARS = re.compile(r"[^A-Za-z0-9_\-. /:]")
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # Seven tries of 120 s each would hold a batch for minutes; the projector has its own retry.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # Too long is cut here, with a mark; never silently there.
    "MLFLOW_TRUNCATE_LONG_VALUES": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSettings:
    """Where MLflow is."""

    tracking_uri: str
    """`sqlite:///path/to/mlflow.db`, or the http(s) address of a server"""
    experiment: str = "driftlog"
    artifact_root: str | None = None
    """None: beside the database; with a server: where the server says"""


class MlflowTracker:
    """One run of ours in one MLflow run. Not thread-safe: one call at a time."""

    def __init__(self, settings: MlflowSettings, clock: Clock) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow
        import mlflow.entities

        # Each failed SQL statement is logged with its traceback; ours is one line, once.
        for name, level in (("mlflow", "WARNING"), ("alembic", "WARNING"), ("mlflow.store.db.utils", "CRITICAL")):
            logging.getLogger(name).setLevel(level)
        self._mlflow: Any = mlflow
        self._settings = settings
        self._clock = clock
        self._client: Any = None
        self._run = ""
        self._run_id = ""
        self._experiment_id = ""
        self._metrics: list[Any] = []
        self._model_ids: OrderedDict[int, str] = OrderedDict()
        self._nonfinite_warned: set[str] = set()

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; empty before `start`."""
        return self._run_id

    # ------------------------------------------------------------------ the port

    def start(self, run: str, params: Mapping[str, str]) -> str | None:
        """Find the run by its tag or make it. A deleted run is replaced by a new one that names it."""
        self._metrics.clear()
        self._model_ids.clear()
        self._run = run
        with self._talking("start"):
            if self._client is None:
                with self._migration_lock():
                    self._client = self._mlflow.MlflowClient(
                        tracking_uri=self._settings.tracking_uri, registry_uri=self._settings.tracking_uri
                    )
                    self._experiment_id = self._open_experiment()
            else:
                self._experiment_id = self._open_experiment()
            found = self._open_run()
            self._run_id = found.info.run_id
            if found.info.status != "RUNNING":
                self._client.update_run(self._run_id, status="RUNNING")
            self._log_params(dict(found.data.params), params)
            bookmark: str | None = found.data.tags.get(BOOKMARK_TAG)
            return bookmark

    def log_step(self, step: int, metrics: Mapping[str, float], at_us: int) -> None:
        """Buffered points of the curves."""
        with self._talking("log_step"):
            self._buffer(step, metrics, at_us, model_id=None)

    def log_version(
        self, version: int, parent: int | None, tags: Mapping[str, str], metrics: Mapping[str, float], at_us: int
    ) -> None:
        """One LoggedModel a version, found by its tag before it is made."""
        with self._talking("log_version"):
            all_tags = {f"{PREFIX}{key}": _cut(value, _TAG_CHARS) for key, value in tags.items()}
            if parent is not None:
                all_tags[f"{PREFIX}parent"] = str(parent)
                parent_id = self._find_model(parent)
                if parent_id is not None:
                    all_tags[f"{PREFIX}parent_model_id"] = parent_id
            model_id = self._find_model(version)
            if model_id is None:
                model_id = self._make_model(version, all_tags)
            else:
                self._client.set_logged_model_tags(model_id, all_tags)
            self._buffer(version, metrics, at_us, model_id=model_id)

    def save_bookmark(self, bookmark: str) -> None:
        """Write the buffer; the bookmark is in the last batch, and MLflow writes tags of a batch last."""
        if len(bookmark) > _TAG_CHARS:
            raise ValueError(f"bookmark has {len(bookmark)} characters, at most {_TAG_CHARS}")
        with self._talking("save_bookmark"):
            self._flush(bookmark)

    def end(self, status: Literal["finished", "failed", "killed"]) -> None:
        """Close the MLflow run; curves can still be added later."""
        with self._talking("end"):
            self._flush(None)
            self._client.set_terminated(self._run_id, status.upper(), end_time=self._clock.now_us() // 1_000)

    # ------------------------------------------------------------------ experiment and run

    def _open_experiment(self) -> str:
        name = self._settings.experiment
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                made: str = self._client.create_experiment(name, artifact_location=self._artifact_root())
                return made
            except self._mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(name)  # another process was quicker
        if found.lifecycle_stage != "active":
            raise ConfigError(
                f"mlflow.experiment {name!r} was deleted at {self._settings.tracking_uri}: "
                "restore it (mlflow experiments restore), or choose another name"
            )
        experiment_id: str = found.experiment_id
        return experiment_id

    def _open_run(self) -> Any:
        """The run with our tag. Where two were made by accident, every process takes the older one."""
        everything = self._mlflow.entities.ViewType.ALL
        runs = self._client.search_runs(
            [self._experiment_id],
            f"tags.`{PREFIX}run` = '{self._run}'",
            run_view_type=everything,
            max_results=100,
            order_by=["attributes.start_time ASC"],
        )
        active = [run for run in runs if run.info.lifecycle_stage == "active"]
        if active:
            return active[0]
        tags = {f"{PREFIX}run": self._run, "mlflow.source.name": "driftlog"}
        if runs:
            tags[f"{PREFIX}replaces"] = runs[-1].info.run_id
            event(log, "tracker_run_was_deleted", level=logging.WARNING, run=self._run, old_run_id=runs[-1].info.run_id)
        return self._client.create_run(self._experiment_id, run_name=self._run, tags=tags)

    def _artifact_root(self) -> str | None:
        database = _sqlite_path(self._settings.tracking_uri)
        if self._settings.artifact_root is not None or database is None:
            return self._settings.artifact_root
        return (database.parent / "mlflow-artifacts").resolve().as_uri()

    # ------------------------------------------------------------------ params

    def _log_params(self, there: Mapping[str, str], params: Mapping[str, str]) -> None:
        """Add what is new. MLflow cannot change a value: a changed one is added under `<key>/segment-<n>`."""
        fresh: dict[str, str] = {}
        for key, value in sorted(params.items()):
            candidate, latest, segment = _name(key), None, 0
            while candidate in there:
                latest, segment = there[candidate], segment + 1
                candidate = f"{_name(key)}/segment-{segment}"
            if latest is None or not _same_param(latest, value):
                fresh[candidate] = value
        names = sorted(fresh)
        for begin in range(0, len(names), _PARAMS_A_BATCH):
            self._log_param_batch({name: fresh[name] for name in names[begin : begin + _PARAMS_A_BATCH]})

    def _log_param_batch(self, params: Mapping[str, str]) -> None:
        param = self._mlflow.entities.Param
        for limit in _PARAM_CHARS:
            entries = [param(name, _cut(value, limit, _artifact_of(name))) for name, value in params.items()]
            try:
                self._client.log_batch(self._run_id, params=entries)
            except self._mlflow.MlflowException as error:
                too_long = error.error_code == "INVALID_PARAMETER_VALUE" and "length" in str(error).lower()
                if not too_long or limit == _PARAM_CHARS[-1]:
                    raise
                continue
            for name, value in params.items():
                if len(value) > limit:
                    self._client.log_text(self._run_id, value, _artifact_of(name))
            return

    # ------------------------------------------------------------------ versions

    def _find_model(self, version: int) -> str | None:
        """Of this MLflow run only: a run that replaces a deleted one has versions of its own."""
        if version in self._model_ids:
            self._model_ids.move_to_end(version)
            return self._model_ids[version]
        found = self._client.search_logged_models(
            [self._experiment_id],
            filter_string=f"source_run_id = '{self._run_id}' AND tags.`{PREFIX}version` = '{version}'",
            max_results=1,
        )
        if not found:
            return None
        self._remember(version, found[0].model_id)
        return self._model_ids[version]

    def _make_model(self, version: int, tags: Mapping[str, str]) -> str:
        """An external model: its weights lie in the checkpoint store, MLflow only describes them."""
        model = self._client.create_logged_model(
            self._experiment_id,
            name=f"{self._run}-v{version}",
            source_run_id=self._run_id,
            tags={
                "mlflow.model.isExternal": "true",
                f"{PREFIX}run": self._run,
                f"{PREFIX}version": str(version),
                **tags,
            },
            model_type=MODEL_TYPE,
        )
        self._client.finalize_logged_model(model.model_id, "READY")
        output = self._mlflow.entities.LoggedModelOutput(model.model_id, step=version)
        self._client.log_outputs(self._run_id, [output])
        self._remember(version, model.model_id)
        return self._model_ids[version]

    def _remember(self, version: int, model_id: str) -> None:
        self._model_ids[version] = model_id
        while len(self._model_ids) > _MODEL_IDS_REMEMBERED:
            self._model_ids.popitem(last=False)

    # ------------------------------------------------------------------ curves

    def _buffer(self, step: int, metrics: Mapping[str, float], at_us: int, *, model_id: str | None) -> None:
        for key, value in metrics.items():
            if not math.isfinite(value):
                # MLflow would store infinity as 1.8e308 and scale every chart by it.
                if key not in self._nonfinite_warned:
                    self._nonfinite_warned.add(key)
                    event(log, "metric_not_finite", level=logging.WARNING, metric=key, version=step, value=str(value))
                continue
            point = self._mlflow.entities.Metric(
                _name(key), float(value), at_us // 1_000, step, model_id=model_id, run_id=self._run_id
            )
            self._metrics.append(point)
        if len(self._metrics) >= _METRICS_A_BATCH:
            self._flush(None)

    def _flush(self, bookmark: str | None) -> None:
        while len(self._metrics) > _METRICS_A_BATCH:
            self._client.log_batch(self._run_id, metrics=self._metrics[:_METRICS_A_BATCH])
            del self._metrics[:_METRICS_A_BATCH]
        tags = [] if bookmark is None else [self._mlflow.entities.RunTag(BOOKMARK_TAG, bookmark)]
        if self._metrics or tags:
            self._client.log_batch(self._run_id, metrics=self._metrics, tags=tags)
            self._metrics.clear()

    # ------------------------------------------------------------------ the boundary

    @contextmanager
    def _talking(self, what: str) -> Iterator[None]:
        """MLflow leaks errors of SQLAlchemy, requests and its own; they leave as TrackerUnavailable."""
        try:
            yield
        except DriftlogError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:500]
            raise TrackerUnavailable(f"mlflow {what}: {type(error).__name__}: {text}{self._hint(text)}") from error

    def _hint(self, text: str) -> str:
        if "403" not in text and "Invalid Host header" not in text:
            return ""
        host = urlsplit(self._settings.tracking_uri).netloc
        return f" (the server may refuse the Host header {host!r}: list it, with its port, in its --allowed-hosts)"

    def _migration_lock(self) -> Any:
        """Only one process at a time may find a sqlite database missing or old, and create or migrate it."""
        database = _sqlite_path(self._settings.tracking_uri)
        return nullcontext() if database is None else _file_lock(database)


@contextmanager
def _file_lock(database: Path) -> Iterator[None]:
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(database.name + ".lock").open("a") as file:
        waiting = threading.Event()
        for _ in range(int(_LOCK_WAIT_S / 0.05)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting.wait(0.05)
        else:
            raise TrackerUnavailable(f"{file.name} is held by another process for more than {_LOCK_WAIT_S:.0f} s")
        yield  # closing the file releases the lock


def _sqlite_path(uri: str) -> Path | None:
    scheme, _, path = uri.partition("///")
    return Path(path.split("?")[0]) if scheme == "sqlite:" and path else None


def _name(text: str) -> str:
    """A metric or parameter name that MLflow accepts."""
    return _BAD_NAME_CHARS.sub("_", text)[:250] or "_"


def _cut(text: str, limit: int, whole_in: str = "") -> str:
    """At most `limit` characters; a cut one says so, and where the rest is."""
    if len(text) <= limit:
        return text
    mark = f"...[cut, {len(text)} characters{f', whole in {whole_in}' if whole_in else ''}]"
    return text[: max(0, limit - len(mark))] + mark


def _artifact_of(name: str) -> str:
    return f"params/{name.replace('/', '.').replace(':', '.').replace(' ', '_')[:120]}.txt"


def _same_param(there: str, value: str) -> bool:
    """The value there is this one, or this one cut."""
    if there == value:
        return True
    head, mark, rest = there.partition("...[cut, ")
    return bool(mark) and rest.startswith(f"{len(value)} characters") and value.startswith(head)
