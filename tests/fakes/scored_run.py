"""A TinyRun whose trainer wrote its scores, as every real one does."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.tiny_export import add_scores
from tests.fakes.tiny_run import TinyRun


class ScoredRun(TinyRun):
    """Nothing is missing in it."""

    def __init__(self, store_root: Path, *, versions: int = 3, end: bool = True) -> None:
        super().__init__(store_root, versions=versions, end=end)
        for version in range(1, versions + 1):
            add_scores(self, version=version)
