"""The way to MLflow: its settings, its client, one process at a time at a new database, and its errors made ours.

The only importer of mlflow beside its siblings mlflow_*.py, and only when a client is opened: it costs seconds.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from schemas.errors import ConfigError, DriftlogError, TrackerUnavailable

_LOCK_WAIT_S = 60.0
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # Seven tries of 120 s each would hold a batch for minutes; the projector has its own retry.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # Too long is cut by us, with a mark; never silently there.
    "MLFLOW_TRUNCATE_LONG_VALUES": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSettings:
    """Where MLflow is."""

    tracking_uri: str
    """`sqlite:///path/to/mlflow.db`, or the http(s) address of a server"""
    experiment: str = "driftlog"
    artifact_root: str | None = None
    """None: beside the database; with a server: where the server says"""


def load_mlflow() -> Any:
    """The library, quiet and without telemetry."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow
    import mlflow.entities

    # Each failed SQL statement is logged with its traceback; ours is one line, once.
    for name, level in (("mlflow", "WARNING"), ("alembic", "WARNING"), ("mlflow.store.db.utils", "CRITICAL")):
        logging.getLogger(name).setLevel(level)
    return mlflow


class MlflowAccess:
    """One client. Not thread-safe: one call at a time."""

    def __init__(self, settings: MlflowSettings) -> None:
        self.mlflow = load_mlflow()
        self.settings = settings
        self.client: Any = None
        self.experiment_id = ""

    def open(self, *, create: bool) -> None:
        """Connect, and find the experiment. create: make what is missing; otherwise ConfigError says what is."""
        database = sqlite_path(self.settings.tracking_uri)
        if not create and database is not None and not database.exists():
            raise ConfigError(f"{database} does not exist: nothing was shown in this MLflow yet")
        first = self.client is None
        # Only one process at a time may find a sqlite database missing or old, and create or migrate it.
        with _file_lock(database) if first and database is not None else nullcontext():
            if first:
                uri = self.settings.tracking_uri
                self.client = self.mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            self.experiment_id = self._open_experiment(create=create)

    def find_runs(self, filter_string: str) -> list[Any]:
        """Runs of the experiment, deleted ones too, oldest first."""
        return list(
            self.client.search_runs(
                [self.experiment_id],
                filter_string,
                run_view_type=self.mlflow.entities.ViewType.ALL,
                max_results=100,
                order_by=["attributes.start_time ASC"],
            )
        )

    @contextmanager
    def talking(self, what: str) -> Iterator[None]:
        """MLflow leaks errors of SQLAlchemy, requests and its own; they leave as TrackerUnavailable."""
        try:
            yield
        except DriftlogError:
            raise
        except Exception as error:
            uri = self.settings.tracking_uri
            text = " ".join(str(error).replace(uri, without_password(uri)).split())[:500]
            raise TrackerUnavailable(f"mlflow {what}: {type(error).__name__}: {text}{self._hint(text)}") from error

    def _open_experiment(self, *, create: bool) -> str:
        name = self.settings.experiment
        found = self.client.get_experiment_by_name(name)
        if found is None and not create:
            raise ConfigError(f"there is no experiment {name!r} at {without_password(self.settings.tracking_uri)}")
        if found is None:
            try:
                made: str = self.client.create_experiment(name, artifact_location=self._artifact_root())
                return made
            except self.mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(name)  # another process was quicker
        if found.lifecycle_stage != "active":
            raise ConfigError(
                f"mlflow.experiment {name!r} was deleted at {without_password(self.settings.tracking_uri)}: "
                "restore it (mlflow experiments restore), or choose another name"
            )
        experiment_id: str = found.experiment_id
        return experiment_id

    def _artifact_root(self) -> str | None:
        database = sqlite_path(self.settings.tracking_uri)
        if self.settings.artifact_root is not None or database is None:
            return self.settings.artifact_root
        return (database.parent / "mlflow-artifacts").resolve().as_uri()

    def _hint(self, text: str) -> str:
        if "403" not in text and "Invalid Host header" not in text:
            return ""
        host = urlsplit(self.settings.tracking_uri).netloc
        return f" (the server may refuse the Host header {host!r}: list it, with its port, in its --allowed-hosts)"


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


def without_password(uri: str) -> str:
    """An address as it may be printed.

    >>> without_password("https://me:hush@mlflow.example:5000/a")
    'https://mlflow.example:5000/a'
    """
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else uri


def sqlite_path(uri: str) -> Path | None:
    """The file of a sqlite address; None for anything else."""
    scheme, _, path = uri.partition("///")
    return Path(path.split("?")[0]) if scheme == "sqlite:" and path else None
