"""The tree keeps its shape; and every rule that says so is tripped here on a small tree of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tree_rules as rules

ROOT = Path(__file__).resolve().parents[2]
RULES: tuple[Callable[[Path], list[str]], ...] = (
    rules.oversized_files,
    rules.oversized_functions,
    rules.missing_docstrings,
    rules.non_ascii,
    rules.foreign_references,
    rules.door_violations,
    rules.forbidden_imports,
    rules.duplicate_test_names,
)
TRIPS: tuple[tuple[Callable[[Path], list[str]], str, str], ...] = (
    (rules.oversized_files, "infra/big.py", '"""Big."""\n' + "x = 1\n" * 400),
    (rules.oversized_functions, "tests/unit/test_long.py", "def test_it():\n" + "    x = 1\n" * 80),
    (rules.oversized_functions, "benchmarks/long.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 80),
    (rules.missing_docstrings, "consumers/bare.py", "x = 1\n"),
    (rules.missing_docstrings, "consumers/new/__init__.py", ""),
    (rules.non_ascii, "docs/page.md", "an \u2013 dash\n"),
    (rules.non_ascii, "Makefile", "# \u00e9\n"),
    (rules.foreign_references, "docs/page.md", "see ../shared" + "/notes\n"),
    (rules.foreign_references, "README.md", "as the " + "design" + ".md page says\n"),
    (rules.foreign_references, "configs/a.toml", 'root = "/work' + '/main/runs"\n'),
    (rules.foreign_references, ".ci/run", "cd /work" + "/main\n"),
    (rules.door_violations, "producers/generator.py", "import kafka\n"),
    (rules.door_violations, "infra/other.py", "def f():\n    from mlflow.tracking import MlflowClient\n"),
    (rules.door_violations, "infra/checkpoint_files.py", "import fsspec\n"),
    (rules.door_violations, "consumers/trainer/learner.py", "from transformers import AutoModel\n"),
    (rules.door_violations, "producers/engines/hf.py", "import importlib\nv = importlib.import_module('vllm')\n"),
    (rules.door_violations, "infra/state.py", "import pickle\n"),
    (rules.door_violations, "infra/state.py", "import torch\nx = torch.load('f')\n"),
    (rules.door_violations, "infra/state.py", "def f():\n    from cloudpickle import loads\n"),
    (rules.door_violations, "driftlog/state.py", "import joblib\n"),
    (rules.door_violations, "consumers/state.py", "import importlib\nx = importlib.import_module('marshal')\n"),
    (rules.door_violations, "driftlog/state.py", "import yaml\nx = yaml.load('f', yaml.Loader)\n"),
    (rules.door_violations, "infra/state.py", "import numpy\nx = numpy.load('f', allow_pickle=True)\n"),
    (rules.door_violations, "infra/model.py", "x = load('f', trust_remote_code=asked)\n"),
    (rules.forbidden_imports, "consumers/objective/loss.py", "from schemas import ids\n"),
    (rules.forbidden_imports, "consumers/trainer/loop.py", "from consumers import coordinator\n"),
    (rules.forbidden_imports, "consumers/projector.py", "import torch\n"),
    (rules.duplicate_test_names, "tests/zoo/test_same.py", '"""Same."""\n'),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_tree_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(("rule", "name", "text"), TRIPS, ids=[f"{rule.__name__}-{name}" for rule, name, _ in TRIPS])
def test_the_rule_finds_a_breach(tmp_path: Path, rule: Callable[[Path], list[str]], name: str, text: str) -> None:
    _write(tmp_path, "tests/unit/test_same.py", '"""Same."""\n')
    assert rule(tmp_path) == []

    _write(tmp_path, name, text)

    findings = rule(tmp_path)
    assert len(findings) >= 1
    assert all(finding.startswith(name) for finding in findings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("infra/kafka_client.py", "import kafka\n"),
        ("infra/mlflow_tracker.py", "import mlflow\n"),
        ("infra/checkpoint_store.py", "import fsspec\n"),
        ("infra/model.py", "import transformers\n"),
        ("producers/engines/vllm.py", "import vllm\n"),
        ("tests/unit/test_broker.py", "import kafka\n"),
    ],
)
def test_each_door_is_open(tmp_path: Path, name: str, text: str) -> None:
    _write(tmp_path, name, text)

    assert rules.door_violations(tmp_path) == []


def test_every_rule_is_tripped_by_some_case() -> None:
    assert {rule.__name__ for rule in RULES} == {rule.__name__ for rule, _, _ in TRIPS}


def test_the_import_contract_holds() -> None:
    result = _lint_imports(ROOT)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("schemas/ids.py", "import infra.ports\n"),
        ("infra/ports.py", "import consumers\n"),
        ("producers/__init__.py", "import consumers\n"),
        ("schemas/ids.py", "import torch\n"),
        ("consumers/trainer/__init__.py", "import consumers.offline\n"),
    ],
)
def test_the_import_contract_is_broken_by_a_wrong_arrow(tmp_path: Path, module: str, text: str) -> None:
    for package in rules.PACKAGES:
        for folder in ("", *(("objective", "trainer", "offline") if package == "consumers" else ())):
            _write(tmp_path, f"{package}/{folder}/__init__.py", "")
    _write(tmp_path, "infra/ports.py", "")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    _write(tmp_path, module, text)

    result = _lint_imports(tmp_path)

    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


def test_the_wheel_holds_exactly_our_packages_and_their_data(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in (*rules.PACKAGES, "tests"):
        shutil.copytree(ROOT / package, tree / package, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr

    wheel = zipfile.ZipFile(tmp_path / result.stdout.strip().splitlines()[-1])
    names = wheel.namelist()

    top_level = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == set(rules.PACKAGES)
    data = [
        path.relative_to(ROOT).as_posix()
        for folder in ("infra/broker_files", "schemas/examples", "driftlog/data")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert [name for name in data if name not in names] == []


def _lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c()"
    command = [sys.executable, "-c", script, "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
