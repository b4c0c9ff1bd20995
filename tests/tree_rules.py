"""Rules about the source tree that no linter knows: sizes, docstrings, ASCII, who may import what.

Each rule is a function from a root folder to findings (one line each, path first). `test_architecture.py`
applies them to this tree, and trips each on a small tree of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

PACKAGES = ("schemas", "infra", "producers", "consumers", "driftlog")
PYTHON_FOLDERS = (*PACKAGES, "tests", "benchmarks", "deploy")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
TEXT_SUFFIXES = frozenset({".py", ".toml", ".md", ".txt", ".yml", ".yaml", ".json", ".sh", ".cfg", ".lock", ".xml", ""})
SKIPPED_FOLDERS = frozenset({"__pycache__", "runs", "build", "dist", "mlruns", "node_modules"})

# One door a client: where a library may be imported. An empty tuple: nowhere.
DOORS: dict[str, tuple[str, ...]] = {
    "kafka": ("infra/kafka_*.py",),
    "mlflow": ("infra/mlflow_*.py",),
    "fsspec": ("infra/checkpoint_store.py",),
    "transformers": ("infra/model.py",),
    "vllm": ("producers/engines/vllm*.py",),
    # What was written by others must never become code.
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "joblib": (),
    "shelve": (),
    "marshal": (),
}
_UNSAFE = {
    "torch.load": "unpickles: use safetensors",
    "torch.jit.load": "runs the code in the file: use safetensors",
    "pandas.read_pickle": "unpickles",
    "pd.read_pickle": "unpickles",
    "yaml.load": "builds any object: use yaml.safe_load",
    "yaml.unsafe_load": "builds any object: use yaml.safe_load",
    "yaml.full_load": "builds objects: use yaml.safe_load",
}
# Keyword -> the only value that may be written for it.
_UNSAFE_WHEN_SET = {"allow_pickle": False, "trust_remote_code": False, "weights_only": True}
# Inside one package: (files, modules they must not import). Everything between packages is in pyproject.toml.
FORBIDDEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "consumers/objective/*.py",
        ("schemas", "infra", "producers", "driftlog", "consumers.trainer", "consumers.offline"),
    ),
    (
        "consumers/trainer/*.py",
        ("consumers.offline", "consumers.coordinator", "consumers.projector", "consumers.evaluator"),
    ),
    ("consumers/coordinator*.py", ("consumers.trainer", "consumers.projector", "consumers.evaluator", "torch")),
    ("consumers/projector*.py", ("consumers.trainer", "consumers.coordinator", "consumers.evaluator", "torch")),
    ("consumers/eval*.py", ("consumers.trainer", "consumers.coordinator", "consumers.projector", "torch")),
)
_DYNAMIC_IMPORTS = frozenset({"importlib.import_module", "import_module", "__import__"})
# Spelled in pieces, so that this file does not trip itself.
_FOREIGN = re.compile(
    "|".join([r"(?<![\w-])" + "shared" + "/", r"(?<![\w.~-])/" + r"work(?=/)", r"\bdesign" + r"\.md\b"])
)


def python_files(root: Path, folders: tuple[str, ...] = PYTHON_FOLDERS) -> Iterator[Path]:
    """Python files of the given folders, sorted."""
    for folder in folders:
        if (root / folder).is_dir():
            yield from sorted(path for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts)


def text_files(root: Path) -> Iterator[Path]:
    """Every text file of the project: no caches, no environments, no run outputs, no stored binary messages."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in {".ci", ".github"}
            if hidden or path.name in SKIPPED_FOLDERS or path.name.endswith(".egg-info"):
                continue
            yield from (
                file
                for file in sorted(path.rglob("*"))
                if file.is_file() and file.suffix in TEXT_SUFFIXES and not SKIPPED_FOLDERS & set(file.parts)
            )
        elif path.suffix in TEXT_SUFFIXES:
            yield path


def oversized_files(root: Path) -> list[str]:
    """Files above MAX_FILE_LINES."""
    counted = ((path, len(path.read_text(encoding="utf-8").splitlines())) for path in python_files(root))
    return [
        f"{path.relative_to(root)}: {lines} lines, at most {MAX_FILE_LINES}: split it by what it owns"
        for path, lines in counted
        if lines > MAX_FILE_LINES
    ]


def oversized_functions(root: Path) -> list[str]:
    """Functions above MAX_FUNCTION_LINES, decorators not counted."""
    findings = []
    for path in python_files(root):
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    findings.append(f"{where}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    return findings


def missing_docstrings(root: Path) -> list[str]:
    """Modules that do not open by saying what they own."""
    return [
        f"{path.relative_to(root)}: no module docstring"
        for path in python_files(root)
        if ast.get_docstring(_parse(path)) is None
    ]


def non_ascii(root: Path) -> list[str]:
    """Text files with a byte above 127."""
    findings = []
    for path in text_files(root):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.isascii():
                findings.append(
                    f"{path.relative_to(root)}:{number}: not ASCII: {line.decode(errors='replace').strip()[:80]!r}"
                )
                break
    return findings


def foreign_references(root: Path) -> list[str]:
    """Mentions of notes or paths outside this repository: the project stands alone."""
    findings = []
    for path in text_files(root):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            match = _FOREIGN.search(line)
            if match is not None:
                findings.append(
                    f"{path.relative_to(root)}:{number}: refers to {match.group()!r}, which is not part of the project"
                )
    return findings


def door_violations(root: Path) -> list[str]:
    """Clients imported outside their one door, also inside functions and by importlib; unsafe readers anywhere."""
    findings = []
    for path in python_files(root, PACKAGES):
        relative = path.relative_to(root).as_posix()
        for line, module in imports(path):
            client = module.split(".")[0]
            if client in DOORS and not any(fnmatch(relative, door) for door in DOORS[client]):
                doors = " or ".join(DOORS[client]) or "nowhere"
                findings.append(f"{relative}:{line}: imports {client}, which is allowed in {doors}")
        findings += [f"{relative}:{line}: {why}" for line, why in _unsafe_readers(_parse(path))]
    return findings


def _unsafe_readers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that make code or objects of bytes that others wrote."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in _UNSAFE:
            yield node.lineno, f"{ast.unparse(node)} {_UNSAFE[ast.unparse(node)]}"
        if isinstance(node, ast.keyword) and node.arg in _UNSAFE_WHEN_SET:
            written = node.value.value if isinstance(node.value, ast.Constant) else None
            if written is not _UNSAFE_WHEN_SET[node.arg]:
                yield node.value.lineno, f"{node.arg} lets a file run code"


def forbidden_imports(root: Path) -> list[str]:
    """Imports against FORBIDDEN."""
    findings = []
    for path in python_files(root, PACKAGES):
        relative = path.relative_to(root).as_posix()
        for pattern, modules in FORBIDDEN:
            if not fnmatch(relative, pattern):
                continue
            for line, imported in imports(path):
                if any(imported == module or imported.startswith(module + ".") for module in modules):
                    findings.append(f"{relative}:{line}: must not import {imported}")
    return findings


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in the file, wherever it stands; `from a import b` gives a and a.b."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in _DYNAMIC_IMPORTS:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def duplicate_test_names(root: Path) -> list[str]:
    """Test files that share a name: without __init__ files the second would shadow the first."""
    seen: dict[str, Path] = {}
    findings = []
    for path in python_files(root, ("tests",)):
        if not path.name.startswith("test_"):
            continue
        if path.name in seen:
            findings.append(f"{path.relative_to(root)}: same name as {seen[path.name].relative_to(root)}")
        seen.setdefault(path.name, path)
    return findings


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
