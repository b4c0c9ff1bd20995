"""The documents hang together: every page is in the site and in the front page's table, every link leads somewhere.

`make docs` builds the site in an environment of its own and checks anchors too; this runs everywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages_of(nav: object) -> list[str]:
    """Every page a nav tree names."""
    if isinstance(nav, str):
        return [nav]
    children = nav if isinstance(nav, list) else list(nav.values()) if isinstance(nav, dict) else []
    return [page for child in children for page in pages_of(child)]


def broken_links(page: Path, root: Path) -> list[str]:
    """Relative links of a page that lead to no file inside the root; addresses and mere anchors are left alone."""
    found = []
    for target in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)):
        path = target.partition("#")[0]
        if not path or "://" in path or path.startswith("mailto:"):
            continue
        resolved = (page.parent / path).resolve()
        if not resolved.exists() or not resolved.is_relative_to(root):
            found.append(f"{page.relative_to(root)}: {target}")
    return found


def test_every_page_is_in_the_site_once_and_every_entry_is_a_page() -> None:
    nav = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}

    assert sorted(nav) == sorted(page for page in pages if not re.match(r"adr/\d", page))


def test_the_front_page_leads_to_every_page() -> None:
    linked = set(_LINK.findall((DOCS / "index.md").read_text(encoding="utf-8")))

    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= linked


def test_every_decision_is_listed_under_its_title() -> None:
    listed = dict(re.findall(r"^\d+\. \[(.*)\]\((.*)\)$", (DOCS / "adr" / "README.md").read_text(), flags=re.MULTILINE))
    titles = {
        path.read_text(encoding="utf-8").partition("\n")[0].partition(". ")[2]: path.name
        for path in (DOCS / "adr").glob("0*.md")
    }

    assert listed == titles


@pytest.mark.parametrize("folder", [".", "docs", "docs/adr"])
def test_every_link_of_the_documents_leads_somewhere(folder: str) -> None:
    pages = sorted((ROOT / folder).glob("*.md"))

    assert pages
    assert [link for page in pages for link in broken_links(page, ROOT)] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](page.md#top) [b](gone.md) [c](https://x.y/z) [d](../outside.md)\n```\n[e](not-a-link.md)\n```\n"
    )

    assert broken_links(page, tmp_path) == ["page.md: gone.md", "page.md: ../outside.md"]
