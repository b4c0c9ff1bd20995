"""A small, complete, correct run made of hand-made messages (tiny_forge changes it afterwards).

Two workers, groups of two, two groups a step. Besides the trained groups it holds what a real log holds: a record
that cannot be decoded (with its dead letter), a second claim of a group, a group that was lost and issued again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from consumers.offline.audit import AuditReport, AuditRules, audit
from consumers.offline.run_log import RunLog
from consumers.trainer.transactions import Transaction
from infra.checkpoint_store import FsspecCheckpointStore
from infra.ports import EventReader, Message, Record
from schemas import policy_events as ev
from schemas.errors import InvalidRecord
from schemas.headers import control_headers, json_headers
from schemas.heartbeat import Heartbeat
from schemas.ids import ClaimId, GroupId, GroupKey, Incarnation, TrajectoryId, WorkerId, parse_group_id
from schemas.ledger import (
    AnyLedgerControl,
    Decision,
    DecisionRow,
    LedgerEnded,
    OpenGroup,
    PartitionProgress,
    Position,
    Settled,
    StepCompleted,
    Subject,
)
from schemas.policy_events import AnyPolicyEvent, decode_policy_event, encode_policy_event
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import DecodedRow, Fingerprint, PromptRequest, Sampling, Segment, Trajectory
from schemas.trajectory_codec import batch_digest, decode_group, encode_group, group_message_headers
from schemas.trajectory_validate import WRITER_LIMITS
from tests.fakes.memory_log import MemoryLog
from tests.fakes.tiny_values import (
    CONFIG_DIGEST,
    GROUP_SIZE,
    RUN,
    dropped_decisions,
    group_decision,
    manifest,
    open_group,
    refused_record,
    request,
    trained_decisions,
)
from tests.fakes.virtual_clock import VirtualClock

GROUPS_PER_STEP = 2
MAX_LAG = 1
WORKERS = ("g0", "g1")
INCARNATION = "i1"
RULES = AuditRules(max_lag=MAX_LAG, advantages=lambda groups: [[r - sum(g) / len(g) for r in g] for g in groups])
_PARTITIONS = range(TOPICS[TopicName.TRAJECTORIES].partitions)


class TinyRun:
    """Make it, change it, audit it. `versions` training steps; `end=False` stops before the closing transaction."""

    def __init__(self, store_root: Path, *, versions: int = 3, end: bool = True) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(self.clock)
        self._client = self.log.client("tiny")
        self._client.admin().create_topics(RUN)
        self._writer = self._client.transactional_writer(f"{RUN}-trainer")
        self._writer.init()
        self.store_root = store_root
        self.store = FsspecCheckpointStore(str(store_root), RUN, fsync=False)
        self._open: list[OpenGroup] = []
        self._next_request = 0
        self._prompt_cursor = 0
        self._next_offset = dict.fromkeys(_PARTITIONS, 0)
        self._proofs: dict[tuple[str, int], int] = {}
        self._live = 0
        self._make(versions, end=end)

    # ------------------------------------------------------------------ what a test asks

    def open_reader(self, topics: Sequence[str]) -> EventReader:
        """The factory RunLog wants."""
        return self._client.reader({name: self.log.topics[name] for name in topics}, "beginning")

    def run_log(self) -> RunLog:
        """A fresh reading."""
        return RunLog(RUN, self.open_reader, clock=self.clock, pause=self.clock.advance)

    def audit(self, rules: AuditRules = RULES, **options: Any) -> AuditReport:
        """A fresh audit, checkpoints included."""
        return audit(self.run_log(), rules, self.store, **options)

    def records(self, name: TopicName) -> list[Record]:
        """Every record of a topic."""
        return list(self.run_log().records(name))

    def open_groups(self) -> list[str]:
        """Ids of the open set, by request."""
        return [group.group_id for group in self._open]

    # ------------------------------------------------------------------ what a test adds

    def append_event(self, event: AnyPolicyEvent) -> int:
        """Write one more policy event; its offset."""
        value = encode_policy_event(event)
        message = Message(
            topic=topic(RUN, TopicName.POLICY),
            key=RUN.encode(),
            value=value,
            headers=control_headers(event, value, "worker"),
        )
        return self.log.append(message).offset

    def append_group(self, rows: Sequence[Trajectory]) -> tuple[int, int]:
        """Write one trajectories record; (partition, offset)."""
        value = encode_group(rows)
        headers = group_message_headers(rows, value, "generator")
        return self._append_trajectories(rows[0].group_id.encode(), value, headers)

    def rows(self, group: str, worker: str, version: int, *, claim: int = 0, reward: float = 1.0) -> list[Trajectory]:
        """The completions of one group: the first member gets the reward, the others none."""
        now_us = self.clock.now_us()
        key = parse_group_id(group)
        return [
            Trajectory(
                trajectory_id=TrajectoryId(f"{group}/{i}"),
                group_id=GroupId(group),
                claim_id=ClaimId(f"{worker}/{INCARNATION}/{claim}"),
                prompt_id=f"prompt-{key.prompt}",
                task="tiny",
                attempt=key.attempt,
                index_in_group=i,
                group_size=GROUP_SIZE,
                worker_id=WorkerId(worker),
                incarnation=Incarnation(INCARNATION),
                prompt_token_ids=np.array([1, 2], dtype=np.int32),
                token_ids=np.array([3, 4 + i, 5], dtype=np.int32),
                logprobs=np.array([-0.5, -0.25, -1.0], dtype=np.float32),
                loss_mask=np.array([True, True, True]),
                segments=(Segment(version=version, length=3, proof=self._proofs[worker, version]),),
                sampling=Sampling(),
                fingerprint=Fingerprint(tokenizer_digest="t", dtype="float32", engine="hf", engine_version="1"),
                finish_reason="stop",
                reward=reward if i == 0 else 0.0,
                reward_function="tiny@1",
                requested_at_us=now_us - 2_000_000,
                started_at_us=now_us - 1_500_000,
                finished_at_us=now_us - 1_000_000,
                published_at_us=now_us - 500_000,
                text=f"answer {i} of {group}",
            )
            for i in range(GROUP_SIZE)
        ]

    # ------------------------------------------------------------------ how it is made

    def _make(self, versions: int, *, end: bool) -> None:
        self._begin()
        self._lose_a_group()
        for step in range(versions):
            self._step(step, last=end and step == versions - 1)
            self._switch(step + 1)
            self._heartbeats(step + 1)
        if end:
            self._end(versions)

    def _begin(self) -> None:
        started = ev.RunStarted(
            run=RUN, at_us=self.clock.now_us(), segment=0, config_digest=CONFIG_DIGEST, code_revision="r"
        )
        requests = self._issue([None] * 2 * GROUPS_PER_STEP, step=0)
        published = self._publish(0)
        self._commit(self._settled("first"), 0, requests=requests, policy=(started, published))
        for worker in WORKERS:
            self.append_event(
                ev.WorkerJoined(
                    run=RUN,
                    at_us=self.clock.now_us(),
                    worker=worker,
                    incarnation=INCARNATION,
                    engine="hf",
                    dtype="float32",
                )
            )
        self._switch(0)

    def _lose_a_group(self) -> None:
        """The second request is lost: dropped in a settle transaction, and asked for again."""
        lost = self._open.pop(1)
        row = group_decision(lost.group_id, Decision.DROPPED, "lost", self.clock.now_us())
        requests = self._issue([lost], step=0)
        self._commit(self._settled("decisions"), 0, decisions=[row], requests=requests)

    def _step(self, step: int, *, last: bool) -> None:
        groups = self._open[:GROUPS_PER_STEP]
        decisions: list[DecisionRow] = []
        dead: list[tuple[Record, InvalidRecord]] = []
        sampled_under = max(0, self._live - 1) if step % 2 else self._live
        policy_read_up_to = self.log.partition(topic(RUN, TopicName.POLICY), 0).end
        if step == 0:
            decisions += self._poison(dead)
        for number, group in enumerate(groups):
            worker = WORKERS[number % 2]
            rows = self.rows(group.group_id, worker, sampled_under, claim=group.request_position, reward=1.0 + step)
            key = self.append_group(rows)
            self.clock.advance(1.0)
            decisions.append(group_decision(group.group_id, Decision.TRAINED, "", self.clock.now_us()))
            decisions += trained_decisions(key, self._decoded(key), step - sampled_under, self.clock.now_us())
            if step == 1 and number == 0:
                again = self.rows(group.group_id, "g1", sampled_under, claim=group.request_position)
                decisions += dropped_decisions(
                    again_key := self.append_group(again), self._decoded(again_key), "duplicate", self.clock.now_us()
                )
        self._open = self._open[GROUPS_PER_STEP:]
        self._read_everything()
        requests = [] if last else self._issue([None] * GROUPS_PER_STEP, step=step + 1)
        published = self._publish(step + 1)
        control = self._completed(step, decisions, policy_read_up_to)
        self._commit(control, step + 1, decisions=decisions, dead=dead, requests=requests, policy=(published,))

    def _poison(self, dead: list[tuple[Record, InvalidRecord]]) -> list[DecisionRow]:
        partition, offset = self._append_trajectories(b"poison", b"these are no Arrow bytes", ())
        record = next(r for r in self.records(TopicName.TRAJECTORIES) if (r.partition, r.offset) == (partition, offset))
        error = InvalidRecord("no_schema_header", "the record has no header arrow-schema")
        dead.append((record, error))
        return [refused_record((partition, offset), error, self.clock.now_us())]

    def _end(self, versions: int) -> None:
        decisions = [group_decision(g.group_id, Decision.DROPPED, "run_ended", self.clock.now_us()) for g in self._open]
        self._open = []
        end = LedgerEnded(
            run=RUN, at_us=self.clock.now_us(), position=self._position(), policy_read_up_to=self._policy_end(),
            last_version=versions, reason="completed",
        )  # fmt: skip
        ended = ev.RunEnded(run=RUN, at_us=self.clock.now_us(), last_version=versions, reason="completed")
        self._commit(end, versions, decisions=decisions, policy=(ended,))

    def _issue(self, old: Sequence[OpenGroup | None], *, step: int) -> list[PromptRequest]:
        requests = []
        for again in old:
            if again is None:
                key = GroupKey(run=RUN, prompt=self._prompt_cursor, epoch=0, attempt=0)
                self._prompt_cursor += 1
            else:
                key = dataclasses.replace(parse_group_id(again.group_id), attempt=again.attempt + 1)
            asked = request(key, self._next_request, step, self._live, self.clock.now_us())
            self._next_request += 1
            requests.append(asked)
            self._open.append(open_group(asked))
        return requests

    def _publish(self, version: int) -> ev.VersionPublished:
        attempt = f"a{version:03d}"

        def write(directory: Path) -> None:
            (directory / "model.safetensors").write_bytes(f"weights of {version}".encode() * 8)
            (directory / "config.json").write_text("{}")
            (directory / "trainer_state.json").write_text("{}")

        saved = self.store.save(attempt, write, manifest(attempt, version))
        return ev.VersionPublished(
            run=RUN, at_us=self.clock.now_us(), version=version, parent=version - 1 if version else None, depth=version,
            manifest_uri=saved.manifest_uri, manifest_sha256=saved.manifest_sha256, bytes=saved.bytes,
            optimizer_step=version, oldest_open_request=0,
        )  # fmt: skip

    def _switch(self, version: int) -> None:
        self.clock.advance(1.0)
        now_us, switch = self.clock.now_us(), f"s{version}"
        required = tuple(ev.WorkerRef(worker=worker, incarnation=INCARNATION) for worker in WORKERS)
        self.append_event(
            ev.SwitchStarted(
                run=RUN, at_us=now_us, switch=switch, version=version, mode="barrier", read_up_to=self._policy_end(),
                required=required, deadline_s=30.0,
            )
        )  # fmt: skip
        acks = []
        published = [
            e
            for r in self.records(TopicName.POLICY)
            if isinstance(e := decode_policy_event(r.value), ev.VersionPublished)
        ][-1]
        for worker in WORKERS:
            offset = self.append_event(
                ev.VersionLoaded(
                    run=RUN, at_us=now_us, switch=switch, worker=worker, incarnation=INCARNATION, version=version,
                    manifest_sha256=published.manifest_sha256, probe_diff_new=1e-6, probe_diff_old=0.3,
                    probe_tolerance=1e-4, phase_s={"fetch": 0.1},
                )
            )  # fmt: skip
            self._proofs[worker, version] = offset
            acks.append(offset)
        self.clock.advance(1.0)
        self.append_event(
            ev.VersionActivated(run=RUN, at_us=self.clock.now_us(), switch=switch, version=version, acks=tuple(acks))
        )
        self._live = version

    def _heartbeats(self, version: int) -> None:
        for number, worker in enumerate(WORKERS):
            beat = Heartbeat(
                run=RUN, at_us=self.clock.now_us(), worker=worker, incarnation=INCARNATION, sequence=version,
                state="serving", version=version, claims=tuple(g.group_id for g in self._open[:1]),
                tokens_total=10 * version, groups_total=version, tokens_per_s=5.0, idle_fraction=0.25 + number / 2,
            )  # fmt: skip
            value = beat.model_dump_json().encode()
            headers = json_headers(event_type="Heartbeat", source=worker, value=value, at_us=beat.at_us)
            self.log.append(
                Message(
                    topic=topic(RUN, TopicName.WORKERS),
                    key=f"{worker}/{INCARNATION}".encode(),
                    value=value,
                    headers=headers,
                )
            )

    def _completed(self, step: int, decisions: Sequence[DecisionRow], policy_read_up_to: int) -> StepCompleted:
        used = [r for r in decisions if r.decision is Decision.TRAINED and r.subject is Subject.TRAJECTORY]
        lags = [r.policy_lag or 0 for r in used]
        metrics = {f"policy_lag/count_{lag}": float(lags.count(lag)) for lag in sorted(set(lags))}
        metrics |= {
            "trainer/idle_fraction": 0.5, "age_seconds/mean": 2.0, "age_seconds/max": 3.0 + step, "actor/entropy": 1.5,
            "actor/ratio_ess": 0.9, "actor/pg_clipfrac": 0.1, "actor/ppo_kl": 0.01, "policy_lag/max": float(max(lags)),
        }  # fmt: skip
        return StepCompleted(
            run=RUN, at_us=self.clock.now_us(), position=self._position(), policy_read_up_to=policy_read_up_to,
            version_in=step, version_out=step + 1, groups=len({r.group_id for r in used}), trajectories=len(used),
            batch_digest=batch_digest(r.row_sha256 or "" for r in used), metrics=metrics, phase_s={"whole": 2.0},
            rng_digest="rng", config_digest=CONFIG_DIGEST, code_revision="r",
        )  # fmt: skip

    def _settled(self, reason: str) -> Settled:
        return Settled(
            run=RUN,
            at_us=self.clock.now_us(),
            position=self._position(),
            policy_read_up_to=self._policy_end(),
            reason=reason,
        )

    def _position(self) -> Position:
        return Position(
            open_groups=tuple(self._open),
            next_request=self._next_request,
            prompt_cursor=self._prompt_cursor,
            partitions={p: PartitionProgress(next_offset=self._next_offset[p]) for p in _PARTITIONS},
        )

    def _commit(
        self,
        control: AnyLedgerControl,
        version_key: int,
        *,
        decisions: Sequence[DecisionRow] = (),
        dead: Sequence[tuple[Record, InvalidRecord]] = (),
        requests: Sequence[PromptRequest] = (),
        policy: Sequence[AnyPolicyEvent] = (),
    ) -> None:
        transaction = Transaction(
            run=RUN,
            control=control,
            version_key=version_key,
            decisions=decisions,
            dead=dead,
            requests=requests,
            policy=policy,
        )
        self._writer.commit(transaction.messages())

    def _append_trajectories(self, key: bytes, value: bytes, headers: Any) -> tuple[int, int]:
        placed = self.log.append(
            Message(topic=topic(RUN, TopicName.TRAJECTORIES), key=key, value=value, headers=tuple(headers))
        )
        return placed.partition, placed.offset

    def _decoded(self, key: tuple[int, int]) -> tuple[DecodedRow, ...]:
        record = self.log.partition(topic(RUN, TopicName.TRAJECTORIES), key[0]).entries[key[1]].record
        assert record is not None
        return decode_group(record.value, record.headers, WRITER_LIMITS)

    def _read_everything(self) -> None:
        for partition in _PARTITIONS:
            self._next_offset[partition] = self.log.partition(topic(RUN, TopicName.TRAJECTORIES), partition).end

    def _policy_end(self) -> int:
        return self.log.partition(topic(RUN, TopicName.POLICY), 0).end
