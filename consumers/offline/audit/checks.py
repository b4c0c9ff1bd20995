"""The names of the audit's checks: what each means, and what it counts when it says how much it compared."""

from __future__ import annotations

FAMILIES: dict[str, str] = {
    "log": "the log is whole",
    "G1": "accounted",
    "G2": "fresh",
    "G3": "traceable",
    "G4": "proven switch",
    "G5": "atomic step",
    "G6": "reproducible",
    "store": "the checkpoint store",
    "recompute": "numbers computed again",
    "mlflow": "the mirror",
}
OPTIONAL = frozenset({"store", "recompute", "mlflow"})
"""families that are made only where a store is given, or when they are asked for"""

CHECKS: dict[str, str] = {
    # the log is whole
    "log.truncated": "no topic ends before what the trainer has read of it",
    "log.gap": "ranges that retention removed: what stands on them is not judged",
    # G1 accounted
    "G1.ledger_record": "every ledger record is readable and is what the trainer wrote (ce_id is made of the bytes)",
    "G1.request_record": "every prompt request is readable, once, at its position's partition",
    "G1.group_undecided": "every issued group has a group decision, or is open while the run is under way",
    "G1.group_decided_twice": "no group has two group decisions",
    "G1.group_unknown": "no decision is about a group that was never issued",
    "G1.group_mismatch": "rows are trained exactly when their group is, in one transaction, all of one claim",
    "G1.trajectory_undecided": "every trajectory row in the log has a first decision",
    "G1.decided_twice": "no row or record has two first decisions",
    "G1.trained_twice": "no trajectory is trained twice",
    "G1.replay": "a replay follows a first use, keeps its advantage, and stays inside max_use",
    "G1.decision_without_row": "no decision is about something that is not in the log",
    "G1.record_split": "the rows of a record are decided in one transaction",
    "G1.row_altered": "row_sha256 of the decision is the hash of the row in the log",
    "G1.decision_altered": "ids, reward, tokens, weight and advantage of a decision agree with the row and each other",
    "G1.advantage": "advantages are finite, and equal those recomputed from the rewards in the log",
    "G1.trained_invalid": "no row that fails validation is trained",
    "G1.record_undecided": "every record that cannot be decoded has a record decision",
    "G1.dead_letter": "every refused record lies in deadletters, byte for byte",
    "G1.refused_but_decodes": "a refused record that this build can decode",
    "G1.after_end": "rows behind the end of the run: not counted, by rule",
    "G1.open": "the run is under way: what is not decided yet",
    # G2 fresh
    "G2.lag_above_limit": "no trained row has a policy lag above max_lag",
    "G2.lag_differs": "the policy lag of a decision is the one along the parent chain",
    "G2.not_an_ancestor": "no token of another branch or from the future is trained",
    "G2.limits_unknown": "the limits of every step's configuration are known",
    "G2.stale_but_fresh": "nothing is dropped as stale that is inside the limit",
    # G3 traceable
    "G3.proof": "each trained segment's proof is its worker's legal VersionLoaded, read before the step",
    "G3.not_activated": "in barrier mode each trained version was activated before the trainer decided",
    # G4 proven switch
    "G4.live_without_proof": "every version that went live stands on proofs of its own bytes",
    "G4.trainer_event_void": "no event of the trainer is void: it is fenced and writes in transactions",
    "G4.other_bytes": "no worker ever proved other bytes than those a version was published with",
    "G4.policy_record": "every policy record is what its writer wrote",
    "G4.void_events": "events that are illegal at their position and so count for nobody",
    "G4.unreadable_events": "policy records that cannot be decoded and so count for nobody",
    "G4.weak_proofs": "proofs whose probe could not tell new weights from old: the sha256 alone carries them",
    # G5 atomic step
    "G5.step_without_version": "every StepCompleted has its VersionPublished",
    "G5.version_without_step": "every VersionPublished after version 0 has its StepCompleted (a branch start has none)",
    "G5.step_order": "steps follow the parent chain, in order, each on the version before it",
    "G5.step_counts": "groups and trajectories of StepCompleted are those of its decisions",
    "G5.batch_digest": "the batch digest is the one over the trained rows in order",
    "G5.scores": "each row has its scores in the step that trained it, one a token, as the trainer wrote them",
    "G5.position": "each Position follows from the one before: decisions, issued requests, records read",
    "G5.run_end": "policy and ledger agree on the end of the run, and nothing is open there",
    "G5.config": "every step ran under the configuration its run segment names",
    "G5.beyond_ledger": "the run is under way: what other topics hold beyond the ledger's end",
    # G6 reproducible
    "G6.replayable": "every step names what repeats it (RNG, batch, configuration, code), as its checkpoint does",
    # the checkpoint store
    "store.checkpoint": "every version that is not retired is there, and every byte of it is as published",
    "store.manifest": "manifest and event agree",
    "store.unnamed": "directories that no event names: garbage, collected after a grace time",
    # numbers computed again
    "recompute.behaviour": "rows have the log-probabilities that the weights of the versions they claim give",
    "recompute.scores": "the trainer's log-probabilities are those of the weights it started the step from",
    # the mirror
    "mlflow.mirror": "MLflow shows what the log says, entry for entry",
}

COMPARED: dict[str, str] = {
    "log.truncated": "partitions",
    "log.gap": "partitions",
    "G1.ledger_record": "ledger_transactions",
    "G1.request_record": "requests",
    "G1.group_undecided": "groups_issued",
    "G1.group_decided_twice": "group_decisions",
    "G1.group_unknown": "group_decisions",
    "G1.group_mismatch": "group_decisions",
    "G1.trajectory_undecided": "trajectory_rows",
    "G1.decided_twice": "trajectory_rows",
    "G1.trained_twice": "rows_trained",
    "G1.replay": "rows_replayed",
    "G1.decision_without_row": "row_decisions",
    "G1.record_split": "trajectory_records",
    "G1.row_altered": "row_decisions",
    "G1.decision_altered": "row_decisions",
    "G1.advantage": "advantages_recomputed",
    "G1.trained_invalid": "rows_trained",
    "G1.record_undecided": "records_refused",
    "G1.dead_letter": "records_refused",
    "G1.refused_but_decodes": "records_refused",
    "G1.after_end": "trajectory_rows",
    "G1.open": "groups_issued",
    "G2.lag_above_limit": "rows_trained",
    "G2.lag_differs": "rows_trained",
    "G2.not_an_ancestor": "rows_trained",
    "G2.limits_unknown": "steps",
    "G2.stale_but_fresh": "row_decisions",
    "G3.proof": "rows_trained",
    "G3.not_activated": "rows_trained",
    "G4.live_without_proof": "activations",
    "G4.trainer_event_void": "policy_events",
    "G4.other_bytes": "policy_events",
    "G4.policy_record": "policy_events",
    "G4.void_events": "policy_events",
    "G4.unreadable_events": "policy_events",
    "G4.weak_proofs": "proofs",
    "G5.step_without_version": "steps",
    "G5.version_without_step": "versions",
    "G5.step_order": "steps",
    "G5.step_counts": "steps",
    "G5.batch_digest": "steps",
    "G5.scores": "scores",
    "G5.position": "ledger_transactions",
    "G5.run_end": "ledger_transactions",
    "G5.config": "steps",
    "G5.beyond_ledger": "ledger_transactions",
    "G6.replayable": "steps",
    "store.checkpoint": "checkpoints_verified",
    "store.manifest": "checkpoints_verified",
    "store.unnamed": "checkpoints_verified",
    "recompute.behaviour": "tokens_recomputed",
    "recompute.scores": "scores_recomputed",
    "mlflow.mirror": "mlflow_entries",
}
"""check -> the name in the report's counts of what it went through"""


def family(check: str) -> str:
    """The part before the dot."""
    return check.partition(".")[0]
