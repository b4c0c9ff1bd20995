"""The trainer as two ranks of torchrun against a real broker: one rank is killed, torchrun starts both again, the run
resumes and ends, and the audit finds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from driftlog.run_directory import RunDirectory
from infra.config import load_config
from infra.local_broker import BrokerHandle

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = 20
LIMIT_S = 120.0
CONFIG = """
[run]
name = "ranks"
versions = {versions}
directory = "{directory}"

[task]
group_size = 4

[trainer]
groups_per_step = 4
learning_rate = 1e-3
parallel = "fsdp"
rank_timeout_s = 20

[coordinator]
min_workers = 1

[mlflow]
enabled = false
"""

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a rank's process by its environment"),
]


def test_a_run_survives_the_death_of_a_rank(tmp_path: Path, kafka_broker: BrokerHandle) -> None:
    config = tmp_path / "ranks.toml"
    config.write_text(CONFIG.format(directory=tmp_path / "runs", versions=VERSIONS))
    RunDirectory(tmp_path / "runs", "ranks").adopt(load_config(config), accept_changes=False)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DRIFTLOG_KAFKA": kafka_broker.bootstrap_servers}
    env.pop("RANK", None)
    driftlog = [sys.executable, "-m", "driftlog"]
    named = ["--config", str(config)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    torchrun += ["--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    subprocess.run([*driftlog, "topics", *named], env=env, check=True, capture_output=True, timeout=LIMIT_S)

    with (
        started([*driftlog, "coordinate", *named], env, tmp_path / "coordinator.log"),
        started([*driftlog, "generate", *named, "--worker", "g0"], env, tmp_path / "generator.log"),
        started([*torchrun, "-m", "driftlog", "train", *named], env, tmp_path / "trainer.log") as trainer,
    ):
        log = tmp_path / "trainer.log"
        until(lambda: "policy_version=2 " in log.read_text() or trainer.poll() is not None)
        assert trainer.poll() is None, log.read_text()[-3000:]
        os.kill(rank_process(trainer.pid, rank=1), signal.SIGKILL)
        until(lambda: trainer.poll() is not None)

    text = log.read_text()
    assert trainer.returncode == 0, text[-3000:]
    assert "resumed" in text
    audit = subprocess.run(
        [*driftlog, "audit", "--run", "ranks", "--directory", str(tmp_path / "runs")],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank: the child of torchrun with that RANK."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environ = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue  # it is gone, or not ours
        if parent == launcher and f"RANK={rank}".encode() in environ:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank} below {launcher}")


@contextmanager
def started(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run; ended with the test."""
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=env, stdout=stream, stderr=stream)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=20)


def until(holds: Callable[[], bool]) -> None:
    """Wait for it, at most LIMIT_S."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it took too long"
        time.sleep(0.05)
