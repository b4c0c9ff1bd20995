"""docs/cases.md is the index of the public failure cases: what it names exists, and nothing is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = (
    6, 8, 16, 19, 21, 41, 42, 45, 46, 47, 48, 50, 51, 53, 55, 56, 58, 59, 61, 62, 64, 67, 68, 69, 70, 71, 72, 74,
    76, 79, 82, 84, 87, 88, 89, 90, 92, 93, 95, 97, 98, 99, 101, 103, 105, 106, 109, 110, 111,
)  # fmt: skip
_ROW = re.compile(r"^\| (C\d{2,3}) \| (.+?) \| (.+) \|$")


def index() -> dict[str, tuple[str, list[str]]]:
    """case -> (what is guaranteed, names of tests)."""
    rows = [_ROW.match(line) for line in (ROOT / "docs/cases.md").read_text(encoding="utf-8").splitlines()]
    return {row[1]: (row[2], re.findall(r"`([^`]+)`", row[3])) for row in rows if row is not None}


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("case", sorted(index(), key=lambda case: int(case[1:])))
def test_every_test_that_the_index_names_exists(case: str) -> None:
    guaranteed, names = index()[case]

    assert guaranteed.endswith(".")
    assert names
    for name in names:
        file, _, test = name.partition("::")
        assert test in functions_in(ROOT / "tests" / file), name


def test_the_index_has_every_case_of_the_services() -> None:
    assert [number for number in REQUIRED if f"C{number:02d}" not in index()] == []


def test_every_case_test_is_in_the_index_under_its_case() -> None:
    found = index()
    for path in sorted((ROOT / "tests/cases").glob("test_*.py")):
        for test in sorted(functions_in(path)):
            case = re.match(r"test_c(\d{2,3})_", test)
            if case is not None:
                assert f"cases/{path.name}::{test}" in found[f"C{case[1]}"][1], test
