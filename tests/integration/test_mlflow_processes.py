"""Several processes at one MLflow database: they make it together, and write into one run at the same time."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from infra.mlflow_access import MlflowSettings

ROOT = Path(__file__).resolve().parents[2]
PROCESSES, WRITERS, VALUES = 5, 4, 200
LIMIT_S = 240
# The library is loaded once, before the processes part: what may collide comes after that.
SCRIPT = """
import multiprocessing, sys
from infra.clock import SystemClock
from infra.mlflow_access import MlflowSettings, load_mlflow
from infra.mlflow_tracker import MlflowTracker
from infra.tracker_port import RunOrigin
from schemas.errors import TrackerUnavailable

uri, processes, writers, values = sys.argv[1], *map(int, sys.argv[2:])
shared = RunOrigin(run="shared", log_id="s", started_at_us=0)

def tracker():
    return MlflowTracker(MlflowSettings(tracking_uri=uri), SystemClock())

def begin(number, own):
    origin = RunOrigin(run=f"run-{number}", log_id=str(number), started_at_us=0)
    assert own.start(origin, [{"a": "1"}]) is None
    own.save_bookmark(f"of {number}")
    assert own.start(origin, []) == f"of {number}"

def write(number, own):
    # As the projector: after a failure it starts again and repeats what the bookmark does not cover.
    for first in range(0, values, 50):
        for tries_left in range(9, -1, -1):
            try:
                own.start(shared, [])
                for step in range(first, first + 50):
                    own.log_step(step, {f"of-{number}": step + number / 10}, step * 1000)
                own.save_bookmark(str(number))
                break
            except TrackerUnavailable:
                if not tries_left:
                    raise

def work(number, barrier):
    own = tracker()
    barrier.wait(60)
    begin(number, own)
    barrier.wait(60)  # and the parent makes the run that is shared: a run has one writer that makes it
    barrier.wait(60)
    if number < writers:
        write(number, own)

load_mlflow()
context = multiprocessing.get_context("fork")
barrier = context.Barrier(processes + 1)
children = [context.Process(target=work, args=(number, barrier)) for number in range(processes)]
for child in children:
    child.start()
barrier.wait(60)
barrier.wait(60)
tracker().start(shared, [])
barrier.wait(60)
for child in children:
    child.join(120)
print(*(child.exitcode for child in children))
"""

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Five processes made the database, four of them wrote 200 values each into one run of it."""

    settings: MlflowSettings
    said: str
    complaints: str

    @property
    def database(self) -> Path:
        """The file."""
        return Path(self.settings.tracking_uri.removeprefix("sqlite:///"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    settings = MlflowSettings(tracking_uri=f"sqlite:///{tmp_path_factory.mktemp('together')}/new/mlflow.db")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, settings.tracking_uri, *map(str, (PROCESSES, WRITERS, VALUES))],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return Together(settings=settings, said=done.stdout, complaints=done.stderr)


def test_processes_that_start_together_find_one_database_and_one_experiment(together: Together) -> None:
    assert (together.said, together.complaints) == ("0 0 0 0 0\n", "")
    assert [path.name for path in together.database.parent.iterdir() if path.suffix == ".db"] == ["mlflow.db"]
    with closing(sqlite3.connect(together.database)) as connection:
        (experiments,) = connection.execute(
            "select count(*) from experiments where name = ?", (together.settings.experiment,)
        ).fetchone()
        runs = connection.execute("select value from tags where key = 'driftlog.run'").fetchall()
    assert experiments == 1
    assert sorted(name for (name,) in runs) == [*(f"run-{number}" for number in range(PROCESSES)), "shared"]


def test_four_processes_that_write_into_one_run_lose_no_value_and_write_none_twice(together: Together) -> None:
    with closing(sqlite3.connect(together.database)) as connection:
        rows = connection.execute("select key, step, value, run_uuid from metrics").fetchall()

    assert (together.said, together.complaints) == ("0 0 0 0 0\n", "")
    assert len({row[3] for row in rows}) == 1
    assert len(rows) == 800
    assert {row[:3] for row in rows} == {(f"of-{n}", at, at + n / 10) for n in range(WRITERS) for at in range(VALUES)}
