"""driftlog doctor: what this machine has and lacks. Exit 1 when something needed is missing."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path

from driftlog.options import DEFAULT_DIRECTORY, add_json_option
from infra.runner import ExitCode

EXAMPLE = "driftlog doctor --json"

NEEDED_PYTHON = (3, 11)
NEEDED_JAVA = 17
NEEDED_DISK_BYTES = 3 * 1024**3
"""jars 150 MB, and a demo run: log and 250 checkpoints, about 600 MB"""
NEEDED_MEMORY_BYTES = 3 * 1024**3
"""broker 0.4 GB, trainer and two generators 0.5 GB each, MLflow 0.4 GB"""
PACKAGES = (
    "kafka-python", "crc32c", "zstandard", "pyarrow", "pydantic", "torch", "transformers", "safetensors", "mlflow",
    "rich",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    needed: bool
    """False: only some commands need it"""
    found: str
    advice: str = ""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("doctor", help="what this machine lacks")
    parser.add_argument(
        "--directory", type=Path, default=Path(DEFAULT_DIRECTORY), metavar="DIR", help="where runs will lie"
    )
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Look at everything."""
    findings = examine(options.directory)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            mark = "ok     " if finding.ok else ("MISSING" if finding.needed else "note   ")
            advice = "" if finding.ok else f": {finding.advice}"
            print(f"{mark} {finding.name:<12} {finding.found}{advice}", file=sys.stderr)
    return ExitCode.FAILED if any(finding.needed and not finding.ok for finding in findings) else ExitCode.OK


def examine(directory: Path) -> list[Finding]:
    """All findings."""
    checks: tuple[Callable[[], Finding], ...] = (_python, _java, _maven, _jars, _checksums, _packages, _ports)
    return [*(check() for check in checks), _disk(directory), _memory(), _cores()]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info[:2] >= NEEDED_PYTHON
    return Finding(name="python", ok=ok, needed=True, found=version, advice="install Python 3.11 or later")


def _java() -> Finding:
    advice = (
        f"install a JDK, {NEEDED_JAVA} or later (`apt-get install openjdk-17-jre-headless`), or use a broker you have: "
        "--set kafka.bootstrap_servers=HOST:PORT"
    )
    path = shutil.which("java")
    if path is None:
        return Finding(name="java", ok=False, needed=True, found="not on the PATH", advice=advice)
    said = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30, check=False)
    version = java_version(said.stderr + said.stdout)
    ok = version is not None and version >= NEEDED_JAVA
    found = f"{'unknown version' if version is None else version} ({path})"
    return Finding(name="java", ok=ok, needed=True, found=found, advice=advice)


def java_version(text: str) -> int | None:
    """The feature release in the output of `java -version`.

    >>> java_version('openjdk version "17.0.12" 2024-07-16'), java_version('java version "1.8.0_402"')
    (17, 8)
    """
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match.group(1)) if match else None


def _maven() -> Finding:
    from infra.local_broker import default_cache_dir

    path = shutil.which("mvn")
    have_jars = any(default_cache_dir().glob("kafka_*.jar"))
    return Finding(
        name="maven",
        ok=path is not None,
        needed=not have_jars,
        found=path or "not on the PATH",
        advice="install maven (`apt-get install maven`): it fetches the broker's jars, once",
    )


def _jars() -> Finding:
    from infra.local_broker import default_cache_dir

    directory = default_cache_dir()
    ok = any(directory.glob("kafka_*.jar"))
    return Finding(
        name="broker jars",
        ok=ok,
        needed=False,
        found=str(directory) if ok else "not fetched yet",
        advice="`driftlog broker fetch` gets them; `driftlog up` does it by itself",
    )


def _checksums() -> Finding:
    ok = util.find_spec("crc32c") is not None
    advice = "pip install crc32c: the Kafka client checks every batch in pure Python without it"
    return Finding(name="crc32c", ok=ok, needed=True, found="present" if ok else "absent", advice=advice)


def _packages() -> Finding:
    missing, found = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    advice = f"missing: {', '.join(missing)}; run `make setup`"
    return Finding(name="packages", ok=not missing, needed=True, found=", ".join(found), advice=advice)


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    except OSError as error:
        advice = "the embedded broker listens on a free port of 127.0.0.1: allow that"
        return Finding(name="ports", ok=False, needed=True, found=str(error), advice=advice)
    return Finding(name="ports", ok=True, needed=True, found=f"127.0.0.1 has free ports (tried {port})")


def _disk(directory: Path) -> Finding:
    place = directory.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return Finding(
        name="disk",
        ok=free >= NEEDED_DISK_BYTES and os.access(place, os.W_OK),
        needed=True,
        found=f"{free / 1024**3:.1f} GiB free at {place}",
        advice=f"{NEEDED_DISK_BYTES / 1024**3:.0f} GiB and the right to write are needed; name another --directory",
    )


def _memory() -> Finding:
    info = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text(encoding="ascii")) if info.exists() else None
    if match is None:
        return Finding(name="memory", ok=True, needed=False, found="unknown on this system")
    available = int(match.group(1)) * 1024
    return Finding(
        name="memory",
        ok=available >= NEEDED_MEMORY_BYTES,
        needed=True,
        found=f"{available / 1024**3:.1f} GiB available",
        advice=f"{NEEDED_MEMORY_BYTES / 1024**3:.0f} GiB are needed for the demo",
    )


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return Finding(
        name="cores",
        ok=count >= 2,
        needed=False,
        found=str(count),
        advice="the demo takes 2; with 1 it takes twice as long",
    )
