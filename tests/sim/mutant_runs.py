"""The table of planted bugs, and the run that finds each of them within a stated number of seeds.

A bug is planted while the services run and taken out again before the log is judged, because the checks use the
same fold and the same codecs. The same plans without the bug must find nothing.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from consumers.trainer.replay import ReplayRules
from tests.sim import mutants_evaluator as judge
from tests.sim import mutants_log as log
from tests.sim import mutants_overlap as overlap
from tests.sim import mutants_stale as stale
from tests.sim import mutants_switch as switch
from tests.sim import mutants_trainer as trainer
from tests.sim.faults import KINDS, FaultyWorld, Kind, faults_of
from tests.sim.plan import EVERYBODY, Plan, plan_of
from tests.sim.verdict import quiet, violations

Plant = Callable[[pytest.MonkeyPatch], None]
Changes = Mapping[str, Any]

# Families of plans: the seed's own plan with these settings. Everything else stays as the seed drew it.
CALM: Changes = {"crash_probability": 0.0}
TRAINER_DIES: Changes = {"crashable": ("trainer",), "crash_probability": 0.05, "versions": 7, "groups_per_step": 2}
WORKERS_DIE: Changes = {"crashable": ("g",), "crash_probability": 0.05, "versions": 7, "generators": 2}
COORDINATOR_DIES: Changes = {"crashable": ("coordinator",), "crash_probability": 0.05, "versions": 7}
ALL_DIE: Changes = {"crashable": EVERYBODY, "crash_probability": 0.04, "versions": 7}
BARRIER: Changes = {"mode": "barrier", "hold_for_in_flight": False}
BRANCHES: Changes = {**CALM, "versions": 5, "then_branch_from": 1, "max_lag": 3, "run_ahead": 2, "mode": "rolling"}
RUNS_AHEAD: Changes = {"max_lag": 3, "run_ahead": 2, "groups_per_step": 1, "hold_for_in_flight": False}
NO_LOSS: Changes = {**WORKERS_DIE, "group_timeout_s": 60.0, "max_attempts": 9, "poison_prompt": None}
HALVES: Changes = {
    **WORKERS_DIE,
    "crash_probability": 0.001,
    "die_at": "before writer.send trajectories",
    "group_size": 3,
}
DIES_AFTER_ITS_ACK: Changes = {
    **WORKERS_DIE, "crash_probability": 0.001, "die_at": "after writer.send policy", "generators": 3,
    "slow_share": 0.7, "restart_s": (0.05, 0.2),
}  # fmt: skip
QUICK: Changes = {"polls_per_group": 1, "straggler_share": 0.0, "slow_share": 0.0, "groups_per_step": 1}
OVERLAPS: Changes = {"overlap": True, "max_lag": 2, "run_ahead": 1, "versions": 7, "hold_for_in_flight": False}
POISONOUS: Changes = {**CALM, "poison_prompt": 0, "generators": 2, "versions": 4, "filter_zero_variance": False}
CACHED: Changes = {**CALM, "prefix_cache": True, "versions": 7, "prompts": 3}
LONGER: Changes = {**CALM, "versions": 40, "skew_s": 0.0}
"""than the grace time of unnamed directories"""
EVALUATES: Changes = {"evaluate": True, "crashable": ("evaluator",), "crash_probability": 0.05, "versions": 5}
LATE_GROUPS: Changes = {
    **CALM, "max_lag": 1, "run_ahead": 1, "order": "ready", "batching": "mixed", "straggler_share": 0.4, "versions": 7,
    "generators": 2, "hold_for_in_flight": False, "groups_per_step": 2,
}  # fmt: skip
WEIGHED: Changes = {**LATE_GROUPS, "hard_max_lag": 3, "stale_decay": 0.5, "keep": "all"}
PINS: Changes = {**CALM, "keep": 3, "max_lag": 1, "run_ahead": 1, "versions": 7, "pin_version": 1}
SPARSE_STATE: Changes = {**TRAINER_DIES, "state_every": 3}
BLIND: Changes = {
    **CALM, "generators": 1, "groups_in_flight": 1, "batching": "group", "straggler_share": 0.0, "polls_per_group": 30,
    "max_lag": 3, "run_ahead": 2, "groups_per_step": 12, "lag_share": 0.2, "stall_s": 20.0, "faults_until_s": 40.0,
    "group_timeout_s": 50.0, "versions": 3, "prompts": 40,
}  # fmt: skip
"""one worker with a long queue, and topics that stand still for longer than a lease"""
NONE: tuple[Kind, ...] = ()
_PLAIN: Changes = {
    "then_branch_from": None, "overlap": False, "evaluate": False, "hard_max_lag": None, "stale_decay": 1.0,
    "pin_version": None,
}  # fmt: skip
"""what a family turns on where its bug needs it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug."""

    plant: Plant
    breaks: str
    """the guarantee, and the word with which a violation of it begins"""
    within: int
    """seeds, from 0, of which at least one must find it"""
    changes: Changes = field(default_factory=dict)
    kinds: tuple[Kind, ...] = KINDS
    lost_acks: float = 0.002

    @property
    def name(self) -> str:
        """As in a sentence."""
        return self.plant.__name__

    def plan(self, seed: int) -> Plan:
        """The plan of one seed."""
        return replace(plan_of(seed), limit_s=150.0, **{**_PLAIN, **self.changes})


MUTANTS: tuple[Mutant, ...] = (
    # the evaluator
    Mutant(plant=judge.a_restarted_evaluator_does_not_read_what_it_wrote, breaks="evaluation", within=10,
           changes=EVALUATES),
    Mutant(plant=judge.the_last_version_is_evaluated_only_in_its_turn, breaks="evaluation", within=5,
           changes=EVALUATES),
    Mutant(plant=judge.answers_are_written_as_they_come, breaks="evaluation", within=2, changes=EVALUATES),
    # the trainer
    Mutant(plant=trainer.the_version_is_committed_before_it_is_trained, breaks="G5", within=1),
    Mutant(plant=trainer.lag_is_judged_on_arrival, breaks="G2", within=3, changes={**RUNS_AHEAD, **CALM}),
    Mutant(plant=trainer.the_lag_limit_is_ignored, breaks="G2", within=6,
           changes={**RUNS_AHEAD, **CALM, "max_lag": 1, "run_ahead": 3}, kinds=NONE),
    Mutant(plant=trainer.lag_counts_version_numbers, breaks="G2", within=8, changes=BRANCHES),
    Mutant(plant=trainer.a_stale_proof_is_accepted, breaks="G3", within=2, changes=CALM),
    Mutant(plant=trainer.rows_are_trained_before_their_version_is_live, breaks="G4", within=10,
           changes={**ALL_DIE, **BARRIER}),
    Mutant(plant=trainer.dropped_groups_are_not_replaced, breaks="liveness", within=5,
           changes={**WORKERS_DIE, "group_timeout_s": 1.0}),
    Mutant(plant=trainer.a_dropped_group_is_not_asked_for_again, breaks="G7", within=8,
           changes={**WORKERS_DIE, "group_timeout_s": 1.0}),
    Mutant(plant=trainer.a_slot_is_freed_twice, breaks="G8", within=1),
    Mutant(plant=trainer.a_restart_decides_again, breaks="G1", within=3, changes=TRAINER_DIES),
    Mutant(plant=trainer.positions_leave_out_what_is_undecided, breaks="G1", within=4, changes=TRAINER_DIES),
    Mutant(plant=trainer.the_next_offset_is_one_too_high, breaks="G", within=2, changes=TRAINER_DIES),
    Mutant(plant=trainer.requests_are_issued_twice_after_a_restart, breaks="G1", within=4, changes=TRAINER_DIES),
    Mutant(plant=trainer.a_late_claim_opens_its_group_again, breaks="G", within=6, kinds=("echo",)),
    Mutant(plant=trainer.a_group_is_assembled_from_two_claims, breaks="G1", within=20, changes=HALVES),
    Mutant(plant=trainer.members_are_trained_as_they_come, breaks="G1", within=15, changes=HALVES),
    Mutant(plant=trainer.a_deadline_is_judged_before_reading_to_the_end, breaks="G7", within=12,
           changes={**CALM, **QUICK, "group_timeout_s": 1.5, "lag_share": 0.8}, kinds=("cut_service",)),
    Mutant(plant=trainer.the_run_ends_before_everything_is_read, breaks="G1", within=25,
           changes={**CALM, "lag_share": 1.0, "stall_s": 4.0, "versions": 3, "faults_until_s": 30.0}, kinds=("echo",)),
    Mutant(plant=trainer.dropped_rows_get_no_decision, breaks="G1", within=4, kinds=("echo",)),
    Mutant(plant=trainer.a_group_is_dropped_and_forgotten, breaks="G1", within=4,
           changes={**WORKERS_DIE, "group_timeout_s": 1.0}),
    Mutant(plant=trainer.dead_letters_are_lost, breaks="G1", within=4, kinds=("poison_records",)),
    Mutant(plant=trainer.given_up_prompts_are_ignored, breaks="G7", within=4,
           changes={**POISONOUS, "group_timeout_s": 30.0}, kinds=NONE),
    Mutant(plant=trainer.replay_goes_beyond_max_use, breaks="G1", within=2,
           changes={**CALM, **QUICK, "replay": ReplayRules(steps=3, groups_per_step=2), "max_lag": 3, "versions": 6}),
    Mutant(plant=trainer.a_step_is_computed_on_weights_that_were_not_put_back, breaks="G5", within=8,
           changes=TRAINER_DIES, lost_acks=0.02),
    Mutant(plant=trainer.a_second_trainer_is_not_fenced, breaks="G", within=4, changes=CALM, kinds=("second_trainer",)),
    # publications behind the compute
    Mutant(plant=overlap.the_weights_are_not_copied, breaks="G", within=8, changes={**OVERLAPS, **CALM}),
    Mutant(plant=overlap.decisions_made_meanwhile_are_taken_for_committed, breaks="G1", within=4,
           changes={**OVERLAPS, **CALM}, kinds=("echo", "poison_records")),
    Mutant(plant=overlap.the_position_is_that_of_the_commit, breaks="G1", within=6,
           changes={**TRAINER_DIES, **OVERLAPS}, kinds=("echo", "poison_records")),
    Mutant(plant=overlap.lag_is_counted_to_the_committed_version, breaks="G2", within=8, changes={**OVERLAPS, **CALM}),
    Mutant(plant=overlap.a_failed_publication_is_not_noticed, breaks="", within=8,
           changes={**OVERLAPS, **CALM}, lost_acks=0.02),
    Mutant(plant=overlap.a_second_publication_begins_over_the_first, breaks="", within=8,
           changes={**OVERLAPS, **CALM}),
    Mutant(plant=overlap.the_step_ahead_outlives_a_failed_publication, breaks="", within=8,
           changes={**OVERLAPS, **CALM}, lost_acks=0.02),
    Mutant(plant=overlap.a_settle_overtakes_the_publication, breaks="G", within=4,
           changes={**OVERLAPS, **CALM}, kinds=("echo", "poison_records")),
    # the switch
    Mutant(plant=trainer.a_second_coordinator_is_not_fenced, breaks="G4", within=6, changes=CALM,
           kinds=("second_coordinator",)),
    Mutant(plant=switch.a_version_is_activated_without_acks, breaks="G4", within=2),
    Mutant(plant=switch.the_ack_of_an_old_incarnation_counts, breaks="G4", within=20,
           changes=DIES_AFTER_ITS_ACK, kinds=NONE),
    Mutant(plant=switch.a_worker_acks_before_it_loads, breaks="G3", within=1, changes=CALM),
    Mutant(plant=switch.the_probe_is_not_compared, breaks="G3", within=6, kinds=("wrong_weights",)),
    Mutant(plant=switch.generated_tokens_are_not_probed, breaks="G3", within=6, changes=CACHED,
           kinds=("stale_prefixes",)),
    Mutant(plant=switch.the_probe_meets_a_cold_cache, breaks="G3", within=6, changes=CACHED, kinds=("stale_prefixes",)),
    Mutant(plant=switch.the_prefix_cache_is_not_emptied, breaks="liveness", within=2, changes=CACHED, kinds=NONE),
    Mutant(plant=switch.the_version_before_is_fetched, breaks="G3", within=2, changes=CALM),
    Mutant(plant=switch.a_worker_serves_with_weights_in_doubt, breaks="stopped", within=6,
           changes=CALM, kinds=("torn_after",)),
    Mutant(plant=switch.tokens_are_sampled_while_weights_are_loaded, breaks="stopped", within=6,
           changes={**CALM, "slow_share": 0.5, "in_flight": "keep"}),
    Mutant(plant=switch.a_lease_runs_out_unread, breaks="G7", within=20,
           changes={**CALM, "lag_share": 1.0, "stall_s": 12.0, "versions": 7, "faults_until_s": 60.0}, kinds=NONE),
    Mutant(plant=switch.the_coordinator_decides_before_it_has_read_the_log, breaks="G4", within=3,
           changes={**COORDINATOR_DIES, "lag_share": 0.4}),
    Mutant(plant=switch.a_late_joiner_is_never_admitted, breaks="liveness", within=6, changes=WORKERS_DIE),
    Mutant(plant=switch.a_failed_switch_is_not_tried_again, breaks="liveness", within=8,
           changes={**CALM, "generators": 1}, kinds=("torn_before", "torn_files", "late_files")),
    Mutant(plant=switch.leases_of_the_dead_are_kept, breaks="G8", within=6,
           changes={"crashable": ("g",), "crash_probability": 0.08, "versions": 7, "generators": 3,
                    "restart_s": (0.2, 0.4), "faults_until_s": 40.0}),
    # the worker's side of the log
    Mutant(plant=switch.prompts_are_committed_before_the_trajectories_are_acknowledged, breaks="G7", within=12,
           changes=NO_LOSS),
    Mutant(plant=switch.a_failed_send_is_forgotten, breaks="G7", within=6,
           changes={**NO_LOSS, "crash_probability": 0.0}, lost_acks=0.05),
    Mutant(plant=switch.heartbeats_name_no_claims, breaks="", within=3, changes=POISONOUS, kinds=NONE),
    Mutant(plant=switch.deaths_are_counted_before_the_heartbeats_are_read, breaks="G7", within=20,
           changes={**POISONOUS, "lag_share": 1.0, "faults_until_s": 60.0}, kinds=NONE),
    # checkpoints
    Mutant(plant=switch.checkpoints_are_named_by_version, breaks="", within=20, changes=CALM,
           kinds=("second_trainer",)),
    Mutant(plant=switch.a_version_is_published_before_its_checkpoint_is_renamed, breaks="liveness", within=8,
           changes=TRAINER_DIES),
    Mutant(plant=switch.files_are_not_verified, breaks="G3", within=6, kinds=("torn_files",)),
    Mutant(plant=switch.a_version_that_is_still_needed_is_retired, breaks="liveness", within=2, changes={"keep": 2}),
    Mutant(plant=switch.a_shared_checkpoint_is_deleted, breaks="", within=10,
           changes={**BRANCHES, "keep": 2, "then_branch_from": 4}),
    # stale.action
    Mutant(plant=stale.every_row_is_weighed_alike, breaks="G2", within=8, changes=WEIGHED),
    Mutant(plant=stale.the_weight_is_that_of_one_step_more, breaks="G2", within=8, changes=WEIGHED),
    Mutant(plant=stale.hard_max_lag_is_ignored, breaks="G2", within=6,
           changes={**RUNS_AHEAD, **CALM, "max_lag": 1, "hard_max_lag": 2, "stale_decay": 0.5, "run_ahead": 4},
           kinds=NONE),
    Mutant(plant=stale.nothing_is_held_for_groups_in_flight, breaks="G2", within=8,
           changes={**LATE_GROUPS, "hold_for_in_flight": True}),
    # which versions are kept, and which is next
    Mutant(plant=stale.a_pinned_version_is_retired, breaks="G4", within=4, changes=PINS),
    Mutant(plant=stale.a_pin_is_forgotten_by_everybody, breaks="G4", within=4, changes=PINS),
    Mutant(plant=stale.the_last_version_with_state_is_retired, breaks="", within=8,
           changes={**SPARSE_STATE, "keep": 3}),
    Mutant(plant=stale.a_switch_goes_to_an_older_candidate_than_the_newest, breaks="G4", within=8,
           changes={**RUNS_AHEAD, **CALM, "versions": 7, "slow_share": 0.7}),
    Mutant(plant=stale.a_branch_does_not_abandon_what_is_open, breaks="G1", within=8, changes=SPARSE_STATE),
    Mutant(plant=stale.a_restart_goes_on_from_a_version_without_state, breaks="G6", within=8, changes=SPARSE_STATE),
    # between the services and the log
    Mutant(plant=log.uncommitted_records_are_read, breaks="G4", within=8, changes=TRAINER_DIES),
    Mutant(plant=log.the_state_is_read_before_the_predecessor_is_fenced, breaks="G1", within=8,
           changes=CALM, kinds=("second_trainer",)),
    Mutant(plant=log.offsets_of_a_revoked_partition_are_committed, breaks="G7", within=8, changes=WORKERS_DIE),
    Mutant(plant=log.kept_groups_get_no_new_segment, breaks="G", within=8,
           changes={**LATE_GROUPS, "in_flight": "keep", "max_lag": 3}),
    Mutant(plant=log.a_worker_that_reads_nothing_goes_on_admitting, breaks="G7", within=6, changes=BLIND, kinds=NONE),
    # collecting garbage
    Mutant(plant=switch.garbage_is_whatever_is_not_live, breaks="", within=4, changes={**LONGER, "keep": "all"}),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt:
    """What became of one mutant."""

    name: str
    breaks: str
    found_at: int | None
    """the first seed that finds it"""
    problem: str
    clean: list[str]
    """violations of the same seeds without the bug: there must be none"""
    cpu_s: float


def hunt(mutant: Mutant, scratch: str | None) -> Hunt:
    """Seeds 0, 1, ... until the bug is found; then the same seeds without it."""
    started_s, problem, found_at, seed = time.process_time(), "nothing", None, 0
    with quiet(), tempfile.TemporaryDirectory(dir=scratch) as folder:
        for seed in range(mutant.within):
            problems = found(mutant, seed, Path(folder) / f"bug{seed}", planted=True)
            right = [one for one in problems if one.startswith(mutant.breaks)]
            problem = (right or problems or ["nothing"])[0]
            if right:
                found_at = seed
                break
        clean = [
            f"seed {number}: {one}"
            for number in range(seed + 1)
            for one in found(mutant, number, Path(folder) / f"clean{number}", planted=False)
        ]
    return Hunt(
        name=mutant.name, breaks=mutant.breaks, found_at=found_at, problem=problem, clean=clean,
        cpu_s=time.process_time() - started_s,
    )  # fmt: skip


def found(mutant: Mutant, seed: int, directory: Path, *, planted: bool) -> list[str]:
    """Violations of one seed of a mutant's plan."""
    directory.mkdir()
    plan = mutant.plan(seed)
    faults = faults_of(seed, plan, mutant.kinds)
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            mutant.plant(patch)
        world = FaultyWorld(plan, directory, faults, lost_acks=mutant.lost_acks)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001 - whatever an impossible state makes of a service, it was noticed
            return [f"stopped: {type(error).__name__}: {error}"]
    try:
        return violations(world)
    except Exception as error:  # noqa: BLE001 - as above, of a check
        return [f"G: stopped: {type(error).__name__}: {error}"]


def run_mutants(only: str | None, say: Callable[[str], None], scratch: str | None, jobs: int) -> int:
    """All of them; 0 when each was found and the code without bugs passes."""
    chosen = [mutant for mutant in MUTANTS if only is None or only in mutant.name]
    started_s = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        hunts = list(pool.map(_hunt_by_name, [mutant.name for mutant in chosen], [scratch] * len(chosen)))
    for one, mutant in zip(hunts, chosen, strict=True):
        where = "NOT FOUND" if one.found_at is None else f"seed {one.found_at:2d}"
        say(f"{where} of {mutant.within:2d}  {one.name}: {one.problem[:140]}")
        for problem in one.clean[:3]:
            say(f"          without the bug: {problem[:200]}")
    result = verdict_of(hunts)
    timing = {
        "wall_s": round(time.perf_counter() - started_s, 1), "cpu_s": round(sum(one.cpu_s for one in hunts), 1),
    }  # fmt: skip
    say(f"RESULT {json.dumps(result | timing)}")
    return 0 if result["undetected"] == result["false_alarms"] == 0 else 1


def verdict_of(hunts: Sequence[Hunt]) -> dict[str, int]:
    """How many, how many were missed, and for how many the code without the bug fails as well."""
    return {
        "mutants": len(hunts),
        "undetected": sum(one.found_at is None for one in hunts),
        "false_alarms": sum(bool(one.clean) for one in hunts),
    }


def _hunt_by_name(name: str, scratch: str | None) -> Hunt:
    return hunt(next(mutant for mutant in MUTANTS if mutant.name == name), scratch)
