"""One run from its start to its findings: faults in their order, then the end by itself, then the log is read back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.chaos_checks import findings
from tests.e2e.chaos_disk import SmallDisk, small_disk
from tests.e2e.chaos_evidence import RecordKey, read_evidence
from tests.e2e.chaos_faults import inject
from tests.e2e.chaos_hits import Hit, traces
from tests.e2e.chaos_plan import LEASE_S, TRAINER, RunPlan, What
from tests.e2e.chaos_price import price
from tests.e2e.chaos_stage import Say, Stage
from tests.e2e.chaos_watch import SeenRecord
from tests.e2e.driving import Site, going, leftovers, make_site

END_LIMIT_S = 600.0
SETTINGS = (
    "generator.workers=2",
    "coordinator.min_workers=2",
    f"coordinator.lease_s={LEASE_S}",
    f"coordinator.switch_deadline_s={LEASE_S}",
    # Checkpoints lie on this machine and are there at once: with the drain's 10 s below the deadline.
    "generator.fetch_timeout_s=1.0",
    "task.group_size=16",
    "trainer.groups_per_step=16",
    "trainer.epochs=2",
    "mlflow.enabled=true",
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    wrong: list[str]
    hits: list[Hit] = field(default_factory=list)
    priced: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    weights_sha256: str = ""


def carry_out(
    plan: RunPlan, folder: Path, *, seed: int, say: Say, mount: bool = True, settings: tuple[str, ...] = SETTINGS
) -> Outcome:
    """Make the run in that folder. A run that cannot be carried to its end is an Outcome that says why."""
    site, random_ = make_site(folder), random.Random(f"{seed}/{plan.name}")
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "store", mount=mount)) if plan.small_store else None
        try:
            return _carry_out(plan, site, random_, disk, say, settings)
        except AssertionError as error:
            say(f"  NOT WHOLE: {error}")
            return Outcome(wrong=[str(error)])


def _carry_out(
    plan: RunPlan, site: Site, random_: random.Random, disk: SmallDisk | None, say: Say, settings: tuple[str, ...]
) -> Outcome:
    store = (f'checkpoints.root="{disk.root}"',) if disk is not None else ()
    words = (*settings, f"run.versions={plan.versions}", *plan.settings, *store)
    with going(site, *words) as process:
        stage = Stage(site, "tiny", process, say)
        try:
            hits, seen = _inject_all(stage, plan, random_, disk)
        except AssertionError:
            stage.tell_stacks()
            raise
        finally:
            stage.close()
        code = process.wait(timeout=END_LIMIT_S)
    assert code == 0, f"`driftlog up` ended with {code}: {(site.folder / 'up-tiny.txt').read_text()[-1500:]}"
    assert leftovers(site) == [], f"left running: {leftovers(site)}"
    run = site.run()
    up_log, trainer_log = (run.logs / "up.log").read_text(), (run.logs / f"{TRAINER}.log").read_text()
    evidence = read_evidence(run, site.summary(), traces(up_log, trainer_log))
    full = any(hit.fault.what is What.FILL_DISK for hit in hits)
    disk_deaths = disk.refusals if full and disk is not None else 0
    wrong = findings(plan, hits, evidence, seen, disk_deaths)
    for finding in wrong:
        say(f"  NOT WHOLE: {finding}")
    return Outcome(
        wrong=wrong,
        hits=hits,
        priced=price(hits, evidence, run.name),
        summary=evidence.summary,
        weights_sha256=evidence.weights_sha256,
    )


def _inject_all(
    stage: Stage, plan: RunPlan, random_: random.Random, disk: SmallDisk | None
) -> tuple[list[Hit], Mapping[RecordKey, SeenRecord]]:
    """Every fault of the plan; what had been read of `trajectories` by then."""
    stage.begin()
    for fault in plan.faults:
        if not fault.overlaps:
            stage.all_recovered()
            stage.for_versions(fault.wait_versions)
        inject(stage, fault, random_, disk)
    stage.all_recovered()
    stage.watch.catch_up()
    return stage.hits, stage.watch.view.records
