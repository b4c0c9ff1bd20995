"""Which code runs: recorded with a run and in every checkpoint. Best effort, never a reason to stop."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

_TIMEOUT_S = 5.0
_TREE = Path(__file__).resolve().parents[1]


def code_revision(tree: Path = _TREE) -> str:
    """`git:<commit>` with `+changes` when files differ from it; `package:<version>` where there is no git."""
    commit = _git(tree, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return f"package:{_package_version()}"
    return f"git:{commit}+changes" if _git(tree, "status", "--porcelain", "--untracked-files=no") else f"git:{commit}"


def _package_version() -> str:
    try:
        return metadata.version("driftlog")
    except metadata.PackageNotFoundError:
        return "unknown"


def _git(tree: Path, *arguments: str) -> str | None:
    """What git says; None when there is no repository, no commit, no git, or no answer in time."""
    if not (tree / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(tree), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
