"""What every test shares: plugins, the tier marker of each folder, one thread a process, no phoning home."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest

# Before anything imports torch or mlflow: two cores are shared by all, and no test may talk to the outside.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")

_PLUGINS = ("tests.fixtures_kafka", "tests.fixtures_mlflow")
pytest_plugins = [name for name in _PLUGINS if importlib.util.find_spec(name) is not None]

TESTS = Path(__file__).parent
TIERS = ("unit", "contract", "sim", "integration", "e2e")

# Machines that run tests are busy: a deadline there measures the neighbours. CI repeats the same examples.
hypothesis.settings.register_profile("driftlog", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("driftlog"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "driftlog")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder's tier; skip gpu tests where there is no accelerator."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in TIERS:
            item.add_marker(folder)
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; this machine has none"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
