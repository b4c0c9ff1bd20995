"""The stored messages of schemas/examples: what they are, and (run as a module) how they are written.

    python -m tests.unit.schemas.make_examples

Stored messages are what earlier builds wrote: rewrite one only together with a new version of its format.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from pydantic import BaseModel

from schemas.arrow_stream import Format
from schemas.checkpoint import Manifest, ManifestFile, decode_manifest
from schemas.errors import InvalidRecord
from schemas.evaluation_codec import EVALUATION, EvaluationRow, decode_evaluation, encode_evaluation, evaluation_headers
from schemas.events_doc import EXAMPLES, JSON_PAYLOADS, event_name
from schemas.headers import Headers, dead_letter_headers, json_headers
from schemas.heartbeat import decode_heartbeat
from schemas.ids import GroupId, Incarnation, WorkerId, claim_id, trajectory_id
from schemas.ledger import (
    Decision,
    DecisionRow,
    LedgerEnded,
    OpenGroup,
    PartitionProgress,
    Position,
    Settled,
    StepCompleted,
    Subject,
    decode_ledger_control,
)
from schemas.ledger_codec import DECISIONS, decisions_headers, decode_decisions, encode_decisions
from schemas.policy_events import decode_policy_event
from schemas.probe_codec import ProbeSequence, decode_probe, encode_probe
from schemas.prompt_codec import PROMPT, decode_request, encode_request, request_headers
from schemas.scores_codec import SCORES, ScoreRow, decode_scores, encode_scores, scores_headers
from schemas.topics import TopicName
from schemas.trajectory import Fingerprint, PromptRequest, Sampling, Segment, Trajectory
from schemas.trajectory_codec import (
    TrajectoryLimits,
    decode_group,
    encode_group,
    group_message_headers,
)
from schemas.trajectory_schema import TRAJECTORY

AT_US = 1_760_000_000_123_456
GROUP = GroupId("demo/p000017/e0/a1")
LIMITS = TrajectoryLimits(vocabulary_size=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One stored message."""

    path: str
    """below schemas/examples"""
    value: bytes
    headers: Headers | None
    decode: Callable[[bytes, Headers], Any]
    expected: Any


def trajectory(index: int = 0, **changes: Any) -> Trajectory:
    """A good row of a group of four: 2 prompt tokens, 3 completion tokens."""
    base = Trajectory(
        trajectory_id=trajectory_id(GROUP, index),
        group_id=GROUP,
        claim_id=claim_id(WorkerId("gen-0"), Incarnation("i1"), 17),
        prompt_id="countdown-17",
        task="countdown",
        attempt=1,
        index_in_group=index,
        group_size=4,
        worker_id=WorkerId("gen-0"),
        incarnation=Incarnation("i1"),
        prompt_token_ids=np.array([5, 6], dtype=np.int32),
        token_ids=np.array([10 + index, 20, 99], dtype=np.int32),
        logprobs=np.array([-0.5, -0.25 * index, 0.0], dtype=np.float32),
        loss_mask=np.array([True, True, False]),
        segments=(Segment(version=3, length=2, proof=41), Segment(version=4, length=1, proof=55)),
        sampling=Sampling(temperature=0.7, logit_bias=((7, -1.5),), stop_token_ids=(2, 3), max_tokens=3, seed=11),
        fingerprint=Fingerprint(tokenizer_digest="ab" * 32, dtype="float32", engine="hf", engine_version="5.19"),
        finish_reason="stop",
        reward=0.5 * index,
        reward_parts={"format": 1.0, "answer": 0.0},
        reward_function="countdown@1",
        requested_at_us=AT_US,
        started_at_us=AT_US + 1,
        finished_at_us=AT_US + 2,
        published_at_us=AT_US + 3,
        text="caf\u00e9",
        metadata={"note": "x"},
    )
    return replace(base, **changes)


def failed_trajectory(index: int) -> Trajectory:
    """A row whose reward failed; text switched off."""
    return trajectory(index, reward=None, reward_error="timeout after 5 s", reward_parts={}, text=None, metadata={})


def request(**changes: Any) -> PromptRequest:
    """A good request."""
    base = PromptRequest(
        group_id=GROUP,
        request_position=17,
        prompt_id="countdown-17",
        task="countdown",
        epoch=0,
        attempt=1,
        group_size=4,
        prompt_token_ids=np.array([5, 6], dtype=np.int32),
        prompt_text="make 24",
        reference={"target": "24"},
        sampling=Sampling(max_tokens=3),
        intended_step=5,
        min_version=4,
        fallback_version=3,
        issued_at_us=AT_US,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    return replace(base, **changes)


def decisions() -> tuple[DecisionRow, ...]:
    """One decision of each subject."""
    trained = DecisionRow(
        subject=Subject.TRAJECTORY,
        group_id=GROUP,
        trajectory_id=trajectory_id(GROUP, 0),
        partition=2,
        offset=9,
        row=0,
        row_sha256="cd" * 32,
        decision=Decision.TRAINED,
        reason="",
        policy_lag=1,
        weight=1.0,
        use_count=1,
        reward=1.0,
        advantage=0.75,
        completion_tokens=3,
        consumed_at_us=AT_US,
    )
    nothing: dict[str, Any] = {"policy_lag": None, "weight": 0.0, "use_count": 0, "reward": None, "advantage": None}
    dropped = replace(
        trained,
        **nothing,
        subject=Subject.GROUP,
        trajectory_id=None,
        partition=None,
        offset=None,
        row=None,
        row_sha256=None,
        decision=Decision.DROPPED,
        reason="incomplete",
        completion_tokens=None,
        detail="3/4 members",
    )
    record = replace(
        dropped, subject=Subject.RECORD, group_id=None, partition=2, offset=10, reason="invalid:truncated", detail=""
    )
    return (trained, dropped, record)


def scores() -> tuple[ScoreRow, ...]:
    """With and without a reference policy."""
    proximal = np.array([-0.5, -0.125, -1.0], dtype=np.float32)
    return (
        ScoreRow(trajectory_id=trajectory_id(GROUP, 0), version_in=4, proximal=proximal, reference=proximal.copy()),
        ScoreRow(trajectory_id=trajectory_id(GROUP, 1), version_in=4, proximal=proximal),
    )


def probe() -> tuple[ProbeSequence, ...]:
    """One sequence of three prompt tokens and two more."""
    ids = np.array([1, 2, 3, 4, 5], dtype=np.int32)
    return (ProbeSequence(token_ids=ids, prompt_length=3, logprobs=np.array([-1.5, -0.5], dtype=np.float32)),)


def evaluations() -> tuple[EvaluationRow, ...]:
    """One answer that was scored and one whose scoring failed."""
    first = EvaluationRow(
        version=4,
        task="countdown",
        prompt_id="held-out-1",
        sample=0,
        temperature=0.0,
        reward=1.0,
        reward_error=None,
        completion_tokens=12,
        finish_reason="stop",
        evaluated_at_us=AT_US,
    )
    return (first, replace(first, sample=1, reward=None, reward_error="timeout"))


def manifest() -> Manifest:
    """A small one."""
    return Manifest(
        run="demo",
        attempt_id="a1",
        parent=3,
        files=(ManifestFile(name="model.safetensors", bytes=10, sha256="ab" * 32),),
        dtype={"all": "float32"},
        tied=(("lm_head.weight", "embed.weight"),),
        probe_sha256="cd" * 32,
        fingerprint={"dtype": "float32"},
        optimizer_step=4,
        has_state=True,
        library_versions={"torch": "2.13"},
        threads=1,
        device_type="cpu",
        logprob_chunk=512,
        code_revision="c0ffee",
        config_digest="ef" * 32,
    )


def _ledger_controls() -> list[Any]:
    position = Position(
        open_groups=(OpenGroup(group_id=GROUP, request_position=17, issued_at_us=AT_US, attempt=1, intended_step=5),),
        next_request=18,
        prompt_cursor=17,
        partitions={0: PartitionProgress(next_offset=12, undecided=(9,))},
    )
    common: dict[str, Any] = {"run": "demo", "at_us": AT_US, "position": position, "policy_read_up_to": 60}
    step = StepCompleted(
        **common,
        version_in=4,
        version_out=5,
        groups=1,
        trajectories=4,
        batch_digest="ab" * 32,
        metrics={"actor/loss": 0.5},
        phase_s={"train": 1.5},
        rng_digest="cd" * 32,
        config_digest="ef" * 32,
        code_revision="c0ffee",
    )
    return [step, Settled(**common, reason="groups dropped"), LedgerEnded(**common, last_version=5, reason="completed")]


def _from_docstring(model: type[BaseModel]) -> bytes:
    """The JSON of the example in a class docstring, whose bytes literals stand one a line."""
    return "".join(re.findall(r"b'(.*?)'[\n),]", inspect.getdoc(model) or "")).encode()


def _scores_headers(rows: tuple[ScoreRow, ...], value: bytes, source: str) -> Headers:
    return scores_headers(rows, value, source, AT_US)


def _arrow(topic: TopicName, name: str, value: bytes, headers: Headers, decode: Any, expected: Any) -> Example:
    return Example(path=f"{topic.value}/{name}.arrow", value=value, headers=headers, decode=decode, expected=expected)


def _json(topic: TopicName, event: BaseModel, decode: Callable[[bytes], Any]) -> Example:
    value = event.model_dump_json().encode()
    name = event_name(type(event))
    headers = json_headers(event_type=name, source="example", value=value, at_us=getattr(event, "at_us"))  # noqa: B009
    return Example(
        path=f"{topic.value}/{name}-1.json",
        value=value,
        headers=headers,
        decode=lambda stored, _: decode(stored),
        expected=event,
    )


def examples() -> list[Example]:
    """Every stored message."""
    group = [trajectory(0), failed_trajectory(1), trajectory(2)]
    value = encode_group(group)
    found = [
        _arrow(
            TopicName.TRAJECTORIES,
            f"{TRAJECTORY.event_type}-1.0",
            value,
            group_message_headers(group, value, "gen-0/i1"),
            lambda stored, headers: [row.trajectory for row in decode_group(stored, headers, LIMITS)],
            group,
        )
    ]
    # The codecs differ in their row types alone.
    others: list[tuple[TopicName, Format, Any, Any, Any, Any]] = [
        (TopicName.LEDGER, DECISIONS, decisions(), encode_decisions, decisions_headers, decode_decisions),
        (TopicName.SCORES, SCORES, scores(), encode_scores, _scores_headers, decode_scores),
        (TopicName.EVALUATIONS, EVALUATION, evaluations(), encode_evaluation, evaluation_headers, decode_evaluation),
    ]
    for topic, fmt, rows, encode, headers_of, decode in others:
        value = encode(rows)
        name = f"{fmt.event_type}-{fmt.version}"
        found.append(_arrow(topic, name, value, headers_of(rows, value, "example"), decode, rows))
    value = encode_request(request())
    found.append(
        _arrow(
            TopicName.PROMPTS,
            f"{PROMPT.event_type}-{PROMPT.version}",
            value,
            request_headers(request(), value, "trainer"),
            decode_request,
            request(),
        )
    )
    for model in JSON_PAYLOADS[TopicName.POLICY]:
        found.append(_json(TopicName.POLICY, decode_policy_event(_from_docstring(model)), decode_policy_event))
    for model in JSON_PAYLOADS[TopicName.WORKERS]:
        found.append(_json(TopicName.WORKERS, decode_heartbeat(_from_docstring(model)), decode_heartbeat))
    found += [_json(TopicName.LEDGER, control, decode_ledger_control) for control in _ledger_controls()]
    return [*found, *_others()]


def _others() -> list[Example]:
    broken = b"no Arrow at all"
    dead = dead_letter_headers(
        (("ce_type", b"TrajectoriesCompleted"),),
        topic="demo.trajectories",
        partition=2,
        offset=10,
        error=InvalidRecord("not_arrow", "no Arrow stream message at byte 0 (of 15)"),
    )
    return [
        Example(
            path="deadletters/DeadLetter-1.bin",
            value=broken,
            headers=dead,
            decode=lambda stored, _: stored,
            expected=broken,
        ),
        Example(
            path="checkpoint/probe.arrow",
            value=encode_probe(probe()),
            headers=None,
            decode=lambda stored, _: decode_probe(stored),
            expected=probe(),
        ),
        Example(
            path="checkpoint/manifest.json",
            value=manifest().encode(),
            headers=None,
            decode=lambda stored, _: decode_manifest(stored),
            expected=manifest(),
        ),
    ]


def same(found: Any, expected: Any) -> bool:
    """Equal, arrays (whose dtypes count) and values that hold arrays included."""
    if isinstance(expected, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and found.dtype == expected.dtype
            and np.array_equal(found, expected, equal_nan=expected.dtype.kind == "f")
        )
    if is_dataclass(expected):
        return type(found) is type(expected) and all(
            same(getattr(found, field.name), getattr(expected, field.name)) for field in fields(expected)
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True))
    return bool(found == expected)


def headers_path(path: str) -> str:
    """Where the headers of a stored message lie."""
    return path.rpartition(".")[0] + ".headers.json"


def read_headers(path: str) -> Headers:
    """Headers of a stored message; none for files of a checkpoint."""
    file = EXAMPLES / headers_path(path)
    return tuple((name, text.encode()) for name, text in json.loads(file.read_text())) if file.exists() else ()


def main() -> None:
    """Write all of them."""
    for example in examples():
        file = EXAMPLES / example.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(example.value)
        if example.headers is not None:
            pairs = [[name, value.decode()] for name, value in example.headers]
            (EXAMPLES / headers_path(example.path)).write_text(json.dumps(pairs, indent=1) + "\n")


if __name__ == "__main__":
    main()
