"""Light things stay light: a tool that reads events or a config must not pay for torch, vllm or mlflow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tree_rules as rules

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "vllm", "mlflow", "kafka", "fsspec")
ALWAYS_LIGHT = ("infra.ports", "infra.clock", "infra.logs", "consumers.projection")


def _light_modules() -> list[str]:
    """`schemas`, every config module, and the pure modules named above."""
    found = set(ALWAYS_LIGHT)
    for path in rules.python_files(ROOT, rules.PACKAGES):
        relative = path.relative_to(ROOT)
        if relative.parts[0] == "schemas" or "config" in relative.stem:
            parts = relative.with_suffix("").parts
            found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


@pytest.mark.parametrize("name", _light_modules())
def test_module_imports_without_heavy_libraries(name: str) -> None:
    assert _loaded_by(f"import {name}") == []


def test_the_check_notices_a_heavy_import() -> None:
    assert _loaded_by("import schemas.ids, sys; sys.modules['torch'] = sys") == ["torch"]


def test_schemas_is_ours_and_not_a_stranger_of_that_name() -> None:
    import schemas

    assert Path(schemas.__file__).resolve().parent == ROOT / "schemas"


def _loaded_by(statement: str) -> list[str]:
    script = f"import json, sys\n{statement}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    loaded: list[str] = json.loads(result.stdout.splitlines()[-1])
    return loaded
