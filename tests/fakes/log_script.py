"""Short ways to write what others write into the log: policy events in order, and trajectory rows.

`PolicyScript` keeps the offsets, so that a test reads as the story it tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from schemas import policy_events as ev
from schemas.ids import ClaimId, GroupId, Incarnation, RunId, WorkerId, trajectory_id
from schemas.policy_fold import PolicyFold
from schemas.policy_state import Void, WorkerKey
from schemas.trajectory import DecodedRow, Fingerprint, Sampling, Segment, Trajectory
from schemas.trajectory_codec import TrajectoryLimits, decode_group, encode_group, group_message_headers

RUN = RunId("demo")
LIMITS = TrajectoryLimits(vocabulary_size=50)
TOKENIZER = "tokenizer-digest"
G0: WorkerKey = ("g0", "i1")
G1: WorkerKey = ("g1", "i1")


class PolicyScript:
    """Folds events as they are told, one offset each; every method returns the Void, or None when legal."""

    def __init__(self, fold: PolicyFold | None = None) -> None:
        self.fold = PolicyFold() if fold is None else fold
        self.events: list[ev.AnyPolicyEvent] = []

    @property
    def last(self) -> int:
        """Offset of the last event."""
        return self.fold.read_up_to - 1

    def tell(self, event: ev.AnyPolicyEvent) -> Void | None:
        """Fold one event at the next offset."""
        self.events.append(event)
        return self.fold.apply(self.fold.read_up_to, event)

    def started(self, segment: int = 0) -> Void | None:
        return self.tell(ev.RunStarted(run=RUN, at_us=0, segment=segment, config_digest="c", code_revision="r"))

    def ended(self, last_version: int) -> Void | None:
        return self.tell(ev.RunEnded(run=RUN, at_us=0, last_version=last_version, reason="completed"))

    def joined(self, *keys: WorkerKey) -> Void | None:
        void = None
        for worker, incarnation in keys:
            event = ev.WorkerJoined(
                run=RUN, at_us=0, worker=worker, incarnation=incarnation, engine="hf", dtype="float32"
            )
            void = self.tell(event)
        return void

    def left(self, key: WorkerKey) -> Void | None:
        return self.tell(ev.WorkerLeft(run=RUN, at_us=0, worker=key[0], incarnation=key[1], reason="signal"))

    def expired(self, key: WorkerKey, reason: ev.ExpiryReason = "lease") -> Void | None:
        event = ev.WorkerExpired(
            run=RUN, at_us=0, worker=key[0], incarnation=key[1], reason=reason, last_heartbeat_at_us=None,
            last_heartbeat_offset=None,
        )  # fmt: skip
        return self.tell(event)

    def published(self, version: int, *, parent: int | None = -1, depth: int | None = None) -> Void | None:
        """Parent and depth default to those of an unbranched run."""
        event = ev.VersionPublished(
            run=RUN, at_us=0, version=version, parent=(version - 1 if version else None) if parent == -1 else parent,
            depth=version if depth is None else depth, manifest_uri=f"demo/a{version}/manifest.json",
            manifest_sha256=sha(version), bytes=1, optimizer_step=version, oldest_open_request=0,
        )  # fmt: skip
        return self.tell(event)

    def switched(self, switch: str, version: int, required: Sequence[WorkerKey]) -> Void | None:
        event = ev.SwitchStarted(
            run=RUN, at_us=0, switch=switch, version=version, mode="barrier", read_up_to=self.fold.read_up_to,
            required=tuple(ev.WorkerRef(worker=w, incarnation=i) for w, i in required), deadline_s=30.0,
        )  # fmt: skip
        return self.tell(event)

    def loaded(self, key: WorkerKey, version: int, switch: str | None, **changes: Any) -> Void | None:
        values: dict[str, Any] = {
            "manifest_sha256": sha(version), "probe_diff_new": 0.0, "probe_diff_old": 0.5, "probe_tolerance": 1e-4,
        } | changes  # fmt: skip
        event = ev.VersionLoaded(
            run=RUN, at_us=0, switch=switch, worker=key[0], incarnation=key[1], version=version, phase_s={}, **values
        )
        return self.tell(event)

    def load_failed(self, key: WorkerKey, version: int, switch: str | None, *, touched: bool = False) -> Void | None:
        event = ev.LoadFailed(
            run=RUN, at_us=0, switch=switch, worker=key[0], incarnation=key[1], version=version, reason="planted",
            weights_touched=touched,
        )  # fmt: skip
        return self.tell(event)

    def activated(self, switch: str, version: int, acks: Sequence[int]) -> Void | None:
        return self.tell(ev.VersionActivated(run=RUN, at_us=0, switch=switch, version=version, acks=tuple(acks)))

    def failed(self, switch: str, version: int) -> Void | None:
        return self.tell(ev.VersionFailed(run=RUN, at_us=0, switch=switch, version=version, reason="no worker left"))

    def admitted(self, key: WorkerKey, version: int, ack: int) -> Void | None:
        event = ev.WorkerAdmitted(run=RUN, at_us=0, worker=key[0], incarnation=key[1], version=version, ack=ack)
        return self.tell(event)

    def retired(self, version: int) -> Void | None:
        return self.tell(ev.VersionRetired(run=RUN, at_us=0, version=version, rule="keep=2"))

    def branched(self, from_version: int) -> Void | None:
        return self.tell(ev.BranchStarted(run=RUN, at_us=0, from_version=from_version))

    # ------------------------------------------------------------------ longer stretches

    def goes_live(self, version: int, keys: Sequence[WorkerKey], *, publish: bool = True) -> dict[WorkerKey, int]:
        """Published, proven by all keys and activated; the offset of each key's proof."""
        assert not publish or self.published(version) is None
        assert self.switched(f"s{version}", version, keys) is None
        proofs = {}
        for key in keys:
            assert self.loaded(key, version, f"s{version}") is None
            proofs[key] = self.last
        assert self.activated(f"s{version}", version, sorted(proofs.values())) is None
        return proofs


def sha(version: int) -> str:
    """manifest_sha256 of a told version."""
    return f"sha-of-{version}"


def running(*keys: WorkerKey, versions: int = 1) -> tuple[PolicyScript, dict[tuple[WorkerKey, int], int]]:
    """A run whose versions 0..n-1 all went live with these workers; (worker, version) -> proof offset."""
    script = PolicyScript()
    script.started()
    script.joined(*keys)
    proofs: dict[tuple[WorkerKey, int], int] = {}
    for version in range(versions):
        proofs |= {(key, version): offset for key, offset in script.goes_live(version, keys).items()}
    return script, proofs


def trajectory(
    group: str = "demo/p000000/e0/a0",
    index: int = 0,
    *,
    group_size: int = 4,
    key: WorkerKey = G0,
    claim: str | None = None,
    segments: Sequence[tuple[int, int, int]] = ((0, 2, 5),),
    reward: float | None = 1.0,
    **changes: Any,
) -> Trajectory:
    """One good row; segments are (version, length, proof)."""
    length = sum(segment[1] for segment in segments)
    values: dict[str, Any] = {
        "trajectory_id": trajectory_id(GroupId(group), index), "group_id": GroupId(group),
        "claim_id": ClaimId(claim or f"{key[0]}/{key[1]}/0"), "prompt_id": "p0", "task": "t",
        "attempt": int(group.rsplit("a", 1)[1]), "index_in_group": index, "group_size": group_size,
        "worker_id": WorkerId(key[0]), "incarnation": Incarnation(key[1]),
        "prompt_token_ids": np.array([1, 2], dtype=np.int32),
        "token_ids": np.arange(3, 3 + length, dtype=np.int32),
        "logprobs": np.full(length, -0.5, dtype=np.float32), "loss_mask": np.ones(length, dtype=np.bool_),
        "segments": tuple(Segment(version=v, length=n, proof=p) for v, n, p in segments), "sampling": Sampling(),
        "fingerprint": Fingerprint(tokenizer_digest=TOKENIZER, dtype="float32", engine="hf", engine_version="1"),
        "finish_reason": "stop", "reward": reward, "reward_function": "r@1",
        "reward_error": None if reward is not None else "crashed",
        "requested_at_us": 0, "started_at_us": 1, "finished_at_us": 2, "published_at_us": 3,
    } | changes  # fmt: skip
    return Trajectory(**values)


def group(group_id: str, rewards: Sequence[float | None], **changes: Any) -> list[Trajectory]:
    """All members of a group, one reward each."""
    size = changes.pop("group_size", len(rewards))
    return [trajectory(group_id, i, reward=r, group_size=size, **changes) for i, r in enumerate(rewards)]


def decoded(rows: Sequence[Trajectory]) -> tuple[DecodedRow, ...]:
    """Rows as a reader gets them: through the bytes of one record."""
    value = encode_group(rows)
    return decode_group(value, group_message_headers(rows, value, "test"), LIMITS)
