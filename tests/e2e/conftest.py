"""What the end-to-end tests share: all need the real broker, and none may leave a process behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.driving import Site, leftovers, make_site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here runs the real log."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.kafka)


@pytest.fixture
def site(tmp_path: Path, kafka_jars: Path) -> Iterator[Site]:
    """A folder for runs; nothing of it may be left running."""
    site = make_site(tmp_path)
    yield site
    assert leftovers(site) == []
