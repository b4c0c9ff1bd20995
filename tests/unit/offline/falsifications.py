"""Everything that somebody could change in the log and the store of a run, one thing at a time, and who tells.

The list is also the table in docs/audit.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from schemas import policy_events as ev
from schemas.checkpoint import MANIFEST_NAME, OPTIMIZER_NAME, WEIGHTS_NAME
from schemas.topics import TopicName
from schemas.trajectory import Trajectory
from tests.fakes import played_forge as by
from tests.fakes.played_forge import GROUP, ROW, Change
from tests.fakes.tiny_forge import remove_step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Falsification:
    """One thing that was changed."""

    where: str
    what: str
    change: Change
    check: str
    """who tells"""
    names: str
    """what the finding says of the record, version or file"""
    weights: bool = False
    """only the weights can tell: `--recompute`"""


def _made(where: str, what: str, change: Change, check: str, names: str) -> Falsification:
    weights = check.startswith("recompute.")
    return Falsification(where=where, what=what, change=change, check=check, names=names, weights=weights)


def _version_3(row: Trajectory) -> dict[str, Any]:
    return {"segments": tuple(dataclasses.replace(segment, version=3) for segment in row.segments)}


ALTERED = "G1.row_altered"
ROWS, LEDGER, POLICY, FILES, SCORES = "trajectories", "ledger", "policy", "checkpoints", "scores"
BAD_SHA256 = "ab" * 32
FALSIFICATIONS = (
    _made(ROWS, "a reward", by.row(reward=9.0), ALTERED, ROW),
    _made(ROWS, "a token", by.edited(by.another_token), ALTERED, ROW),
    _made(ROWS, "a log-probability", by.edited(by.another_logprob), ALTERED, ROW),
    _made(ROWS, "a token is masked out", by.edited(by.masked), ALTERED, ROW),
    _made(ROWS, "the worker that sampled it", by.row(worker_id="g7"), "G3.proof", ROW),
    _made(ROWS, "the version of a segment", by.edited(_version_3), "G2.not_an_ancestor", ROW),
    _made(ROWS, "the claim of one member", by.row(claim_id="g0/i0/77"), "G1.group_mismatch", GROUP),
    _made(ROWS, "a record is removed", lambda f, _: f.remove(by.record_of(f, GROUP)), "G1.decision_without_row", ROW),
    _made(ROWS, "a row is removed from its record", by.one_less, "G1.decision_without_row", f"{GROUP}/3"),
    _made(ROWS, "two groups change places", by.swap, "G1.decision_altered", f"trajectory_id is '{ROW}'"),
    _made(ROWS, "a group is overwritten by a copy of another", by.copy_over, "G1.trained_twice", ROW),
    _made(ROWS, "the rows of a record change places", by.turn_round, "G1.decision_altered", f"id is '{ROW}'"),
    _made(ROWS, "the topic is cut off at its end", by.cut_off, "log.truncated", "sim.trajectories[3]: records 0-"),
    _made("prompts", "a request is removed", by.remove(TopicName.PROMPTS, 0), "G1.request_record", "request 0"),
    _made("prompts", "a byte of a request", by.flip(TopicName.PROMPTS, 1, 3), "G1.request_record", "prompts["),
    _made(LEDGER, "a byte of the decisions", by.flip(TopicName.LEDGER, 3, 700), "G1.ledger_record", "ledger@"),
    _made(LEDGER, "trained becomes dropped", by.flip_decision, "G5.step_counts", "version 1: says 8 trajectories"),
    _made(LEDGER, "dropped becomes trained", by.train_what_was_dropped, "G1.group_mismatch", "/a0/0: trained, but its"),
    _made(LEDGER, "an advantage", by.decision(advantage=0.125), "G1.advantage", f"{ROW}: the ledger says 0.125"),
    _made(LEDGER, "a reward", by.decision(reward=9.0), "G1.decision_altered", f"{ROW}: transaction"),
    _made(LEDGER, "a weight", by.decision(weight=0.5), "G1.decision_altered", "weight 0.5"),
    _made(LEDGER, "a policy lag", by.decision(policy_lag=1), "G2.lag_differs", ROW),
    _made(LEDGER, "the offset of a row", by.decision(offset=77), "G1.decision_without_row", "@77 is not in the log"),
    _made(LEDGER, "the order of the batch", by.reverse, "G5.batch_digest", "version 1"),
    _made(LEDGER, "the batch digest", by.step(0, batch_digest=BAD_SHA256), "G5.batch_digest", "version 1"),
    _made(LEDGER, "the version a step started from", by.step(1, version_in=0), "G5.step_order", "version 2"),
    _made(LEDGER, "what was read of policy", by.step(0, policy_read_up_to=3), "G3.proof", "was not read"),
    _made(LEDGER, "the configuration of a step", by.step(0, config_digest="ab"), "G2.limits_unknown", "config ab"),
    _made(LEDGER, "the RNG state after a step", by.step(0, rng_digest=BAD_SHA256), "G6.replayable", "RNG state abab"),
    _made(LEDGER, "the code of a step", by.step(0, code_revision="git:other"), "G6.replayable", "is 'git:other'"),
    _made(LEDGER, "a transaction is removed", lambda f, _: remove_step(f, 2), "G5.version_without_step", "version 2"),
    _made(LEDGER, "the offsets of a Position", by.position(by.offset_moved), "G5.position", "transaction"),
    _made(LEDGER, "the prompt cursor", by.position(lambda p: {"prompt_cursor": 0}), "G5.position", "prompt_cursor"),
    _made(LEDGER, "an open group is forgotten", by.position(lambda p: {"open_groups": ()}), "G5.position", "left"),
    _made(POLICY, "a byte of an event", by.stamp_of_an_event, "G4.policy_record", "WorkerJoined"),
    _made(POLICY, "a version that nobody trained", by.forged_version, "G4.trainer_event_void", "VersionPublished"),
    _made(POLICY, "an activation without acks", by.event(ev.VersionActivated, 0, acks=()), "G3.not_activated", "never"),
    _made(POLICY, "a proof is removed", by.no_event(ev.VersionLoaded, 0), "G3.proof", ROW),
    _made(POLICY, "a proof whose probe failed", by.event(ev.VersionLoaded, 0, probe_diff_new=1.0), "G3.proof", ROW),
    _made(POLICY, "a proof of another version", by.event(ev.VersionLoaded, 1, version=0), "G3.proof", "no legal"),
    _made(POLICY, "an activation before its proof", by.activated_too_early, "G3.proof", "no legal"),
    _made(
        POLICY, "the sha256 of a manifest", by.event(ev.VersionPublished, 1, manifest_sha256=BAD_SHA256),
        "store.checkpoint", "version 1",
    ),
    _made(POLICY, "a version's state", by.event(ev.VersionPublished, 1, has_state=False), "G6.replayable", "published"),
    _made(POLICY, "the end of the run is removed", by.no_event(ev.RunEnded, 0), "G5.run_end", "run sim"),
    _made(SCORES, "a byte of the scores", by.flip(TopicName.SCORES, 0, -40), "G5.scores", "scores["),
    _made(SCORES, "a record is removed", by.remove(TopicName.SCORES, 0), "G5.scores", "and not scored"),
    _made("deadletters", "a letter is removed", by.remove(TopicName.DEADLETTERS, 0), "G1.dead_letter", "[0]@0: ref"),
    _made(FILES, "a bit of the weights", by.file(2, WEIGHTS_NAME, by.one_bit), "store.checkpoint", WEIGHTS_NAME),
    _made(FILES, "the end of a file", by.file(1, OPTIMIZER_NAME, lambda d: d[:-1]), "store.checkpoint", OPTIMIZER_NAME),
    _made(FILES, "a file is removed", by.no_file(1, "config.json"), "store.checkpoint", "config.json"),
    _made(FILES, "a file is added", by.new_file, "store.checkpoint", "adapter.bin"),
    _made(FILES, "the manifest is removed", by.no_file(1, MANIFEST_NAME), "store.checkpoint", MANIFEST_NAME),
    _made(FILES, "optimizer states change places", by.swapped_state, "store.checkpoint", OPTIMIZER_NAME),
    _made(FILES, "weights and a manifest that fits them", by.manifest_that_fits, "store.checkpoint", MANIFEST_NAME),
    _made(FILES, "and an event that fits the manifest", by.manifest_and_event_that_fit, "G4.other_bytes", "version 2"),
    _made(FILES, "another version's directory", by.another_version_in_its_place, "store.checkpoint", "version 2"),
    _made(SCORES, "a number, and all that follows", by.other_scores, "recompute.scores", f"{ROW}: the trainer's"),
    _made(ROWS, "a log-probability, and all that follows", by.other_numbers_that_fit, "recompute.behaviour", ROW),
    _made(ROWS, "the stamp of a row, and all that follows", by.stamp_that_fits, "recompute.behaviour", "version 0 fit"),
)  # fmt: skip


def table() -> list[str]:
    """The lines of docs/audit.md."""
    lines = ["| where | what was changed | named by |", "|---|---|---|"]
    for one in FALSIFICATIONS:
        how = " (`--recompute`)" if one.weights else ""
        lines.append(f"| {one.where} | {one.what} | `{one.check}`{how} |")
    return lines
