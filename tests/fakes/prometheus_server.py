"""A real Prometheus for a while, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_LIMIT_S = 20.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that answers."""

    address: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector that it answers with now; AssertionError with its words when it refuses."""
        return self._get("query", {"query": expression})["result"]  # type: ignore[no-any-return]

    def firing(self) -> set[str]:
        """Alerts that fire."""
        alerts = self._get("alerts", {})["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def _get(self, what: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        url = f"{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_LIMIT_S) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        return found["data"]  # type: ignore[no-any-return]


@contextmanager
def prometheus(folder: Path, port: int, targets: Sequence[str], rules: Path) -> Iterator[Prometheus]:
    """Started with these targets asked every second, as the job `driftlog`; stopped at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "driftlog", "static_configs": [{"targets": list(targets)}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    words = [
        "prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        _await_ready(process, address)
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _await_ready(process: subprocess.Popen[bytes], address: str) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, "prometheus ended: see its log"
        try:
            with urllib.request.urlopen(f"{address}/-/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"prometheus was not ready within {_LIMIT_S:g} s")
