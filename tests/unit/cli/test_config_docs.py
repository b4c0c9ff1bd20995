"""docs/configuration.md is what the configuration models say."""

from __future__ import annotations

from pathlib import Path

from driftlog.config_docs import configuration_markdown
from infra.config import known_keys

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    remedy = "run: python -m driftlog.config_docs > docs/configuration.md"
    assert PAGE.read_text(encoding="ascii") == configuration_markdown(), remedy


def test_every_key_has_its_row() -> None:
    page = configuration_markdown()

    missing = [key for key in known_keys() if f"| `{key.partition('.')[2]}`" not in page]
    assert missing == []


def test_a_row_has_default_bounds_and_meaning() -> None:
    row = "| `group_size` | `16` | integer, >= 2 | completions of one prompt; a group baseline needs at least 2 |"

    assert row in configuration_markdown()
