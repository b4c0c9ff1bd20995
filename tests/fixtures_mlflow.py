"""An MLflow of its own for each test: sqlite, its tables made once a session and copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.mlflow_access import MlflowSettings
from infra.mlflow_tracker import MlflowTracker
from tests.fakes.projected_log import ORIGIN
from tests.fakes.virtual_clock import VirtualClock


@pytest.fixture(scope="session")
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Making the tables takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    settings = MlflowSettings(tracking_uri=f"sqlite:///{path}", experiment="template")
    MlflowTracker(settings, VirtualClock()).start(ORIGIN, [])
    return path


@pytest.fixture
def mlflow_settings(tmp_path: Path, mlflow_tables: Path) -> MlflowSettings:
    """An empty MLflow."""
    shutil.copy(mlflow_tables, tmp_path / "mlflow.db")
    return MlflowSettings(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}", experiment="tests")


@pytest.fixture
def mlflow_tracker(mlflow_settings: MlflowSettings) -> MlflowTracker:
    """A tracker in it."""
    return MlflowTracker(mlflow_settings, VirtualClock())


@pytest.fixture
def mlflow_client(mlflow_settings: MlflowSettings) -> Any:
    """MLflow's own client of it."""
    import mlflow

    return mlflow.MlflowClient(tracking_uri=mlflow_settings.tracking_uri, registry_uri=mlflow_settings.tracking_uri)
