"""python -m deploy.check [--static]: are the compose files right, and does the stack of docker-compose.yml work?

Without a container engine. Schema and linters of the files, the rules of this project, then every process of the
default profile on this machine. Last line RESULT {json}; exit 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from deploy.check.compose import read_compose, read_env_file
from deploy.check.rules import findings
from deploy.check.stand_in import CheckFailed
from deploy.check.story import play

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
SEVERAL = ROOT / "deploy" / "compose.several-machines.yml"
DEFAULTS = ROOT / ".env"
GPU = ROOT / "deploy" / "gpu.env"
SEVERAL_EXAMPLE = {
    "DRIFTLOG_IMAGE": "registry.example/driftlog/cpu:0.1.0",
    "DRIFTLOG_GPU_IMAGE": "registry.example/driftlog/gpu:0.1.0",
    "DRIFTLOG_BROKERS": "broker-1.example:9093,broker-2.example:9093",
    "DRIFTLOG_KAFKA_USER": "trainer",
    "DRIFTLOG_MLFLOW": "https://mlflow.example",
    "DRIFTLOG_RUN": "demo",
    "DRIFTLOG_VERSIONS": "250",
    "DRIFTLOG_STORE": "s3://bucket/folder",
    "DRIFTLOG_TOML": "../configs/countdown.toml",
}
LINT_LIMIT_S = 60.0


def static_findings() -> list[str]:
    """What the rules find, under every set of variables the project ships."""
    found = [*findings(read_compose(COMPOSE, read_env_file(DEFAULTS))), *findings(read_compose(COMPOSE, {}))]
    found += findings(read_compose(COMPOSE, read_env_file(GPU)))
    without_gpu = {name: value for name, value in SEVERAL_EXAMPLE.items() if name != "DRIFTLOG_GPU_IMAGE"}
    for example in (SEVERAL_EXAMPLE, without_gpu):
        found += findings(read_compose(SEVERAL, example))
    return sorted(set(found))


def lint(tools: Path) -> dict[str, str]:
    """Each linter that is installed: "ok", or what it says; "absent" where it is not."""
    files = [str(COMPOSE), str(SEVERAL)]
    lines = {
        "check-jsonschema": [str(tools / "bin/check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files],
        "hadolint": [str(tools / "bin/hadolint"), str(ROOT / "deploy" / "Dockerfile")],
        "dclint": [str(tools / "node/node_modules/.bin/dclint"), "-c", str(ROOT / "deploy" / "dclint.yaml"), *files],
    }
    said = {}
    for name, line in lines.items():
        if not Path(line[0]).exists():
            said[name] = "absent"
            continue
        done = subprocess.run(line, capture_output=True, text=True, timeout=LINT_LIMIT_S, check=False, cwd=ROOT)
        said[name] = "ok" if done.returncode == 0 else (done.stdout + done.stderr).strip()
    return said


def main() -> int:
    """Everything; 0 when all is well."""
    parser = argparse.ArgumentParser(prog="python -m deploy.check", description=__doc__)
    parser.add_argument("--static", action="store_true", help="the files only")
    parser.add_argument("--tools", type=Path, default=ROOT / ".venv-compose", help="where the linters are installed")
    options = parser.parse_args()
    found = static_findings()
    linted = lint(options.tools)
    for line in (*found, *(f"{name}: {words}" for name, words in linted.items() if words not in ("ok", "absent"))):
        _say(line)
    result: dict[str, Any] = {"findings": len(found), "linters": linted}
    failed = bool(found) or any(words not in ("ok", "absent") for words in linted.values())
    if not failed and not options.static:
        with tempfile.TemporaryDirectory(prefix="driftlog-compose-") as folder:
            try:
                result |= play(COMPOSE, read_env_file(DEFAULTS), Path(folder), _say)
            except CheckFailed as error:
                _say(str(error))
                failed = True
    sys.stdout.write(f"RESULT {json.dumps(result | {'ok': not failed})}\n")
    return int(failed)


def _say(words: str) -> None:
    sys.stderr.write(words + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
