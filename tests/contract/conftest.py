"""Engines of vLLM that the contract tests share: started once, when the first test asks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from producers.engines.vllm_core import VllmCore


@pytest.fixture(scope="session")
def vllm_core() -> Iterator[VllmCore]:
    """Tied embeddings, float32."""
    yield from _started(tied=True, dtype="float32")


@pytest.fixture(scope="session")
def vllm_half_core() -> Iterator[VllmCore]:
    """A head of its own, bfloat16."""
    yield from _started(tied=False, dtype="bfloat16")


def _started(*, tied: bool, dtype: str) -> Iterator[VllmCore]:
    # Imported here: most sessions have no vLLM, and no test that asks.
    from tests.contract.vllm_rig import started
    from tests.fakes.vllm_policy import served_directory

    core = started(served_directory(tied=tied), dtype)
    yield core
    # vLLM leaves a zmq context open, whose warning would fail whatever test is the session's last.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core.close()
        del core
        gc.collect()
