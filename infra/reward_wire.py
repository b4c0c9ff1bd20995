"""What a generator and its reward processes say to each other: one JSON object a line, over a socket pair.

To the worker: a group, or what is left of one; or questions to an environment. From it: `ready`, then per job one line
for each completion or question. JSON and
not Python objects, because what comes back was made beside code of strangers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from infra.environment import Ask, Outcome
from infra.ports import Completion, Reward
from schemas.ids import GroupId
from schemas.trajectory import PromptRequest, Sampling, Segment

MAX_LINE_BYTES = 4 * 1024 * 1024
"""longest answer that is read: a reward with its parts is a few hundred bytes"""


def job_line(request: PromptRequest, completions: Sequence[Completion]) -> bytes:
    """A group to be scored."""
    members = [
        {
            "index": c.index_in_group,
            "token_ids": _packed(c.token_ids, "<i4"),
            "logprobs": _packed(c.logprobs, "<f4"),
            "loss_mask": None if c.loss_mask is None else _packed(c.loss_mask, "|b1"),
            "segments": [[s.version, s.length, s.proof] for s in c.segments],
            "finish_reason": c.finish_reason,
            "text": c.text,
            "times_us": [c.started_at_us, c.finished_at_us],
        }
        for c in completions
    ]
    return _line({"request": _request(request), "completions": members})


def job_of(line: bytes) -> tuple[PromptRequest, list[Completion]]:
    """The group again."""
    message = json.loads(line)
    request = _request_of(message["request"])
    completions = [
        Completion(
            group_id=request.group_id,
            index_in_group=m["index"],
            token_ids=_unpacked(m["token_ids"], "<i4"),
            logprobs=_unpacked(m["logprobs"], "<f4"),
            loss_mask=None if m["loss_mask"] is None else _unpacked(m["loss_mask"], "|b1"),
            segments=tuple(Segment(version=v, length=n, proof=p) for v, n, p in m["segments"]),
            finish_reason=m["finish_reason"],
            text=m["text"],
            started_at_us=m["times_us"][0],
            finished_at_us=m["times_us"][1],
        )
        for m in message["completions"]
    ]
    return request, completions


def asks_line(asks: Sequence[Ask]) -> bytes:
    """Questions to an environment, all of one group."""
    members = [{"member": a.member, "seed": a.seed, "texts": a.texts, "observations": a.observations} for a in asks]
    return _line({"request": _request(asks[0].request), "asks": members})


def asks_of(line: bytes) -> list[Ask]:
    """The questions again."""
    message = json.loads(line)
    request = _request_of(message["request"])
    return [
        Ask(
            request=request,
            member=a["member"],
            seed=a["seed"],
            texts=tuple(a["texts"]),
            observations=tuple(a["observations"]),
        )
        for a in message["asks"]
    ]


def outcome_line(outcome: Outcome) -> bytes:
    """One answer of an environment."""
    return _line({"observation": outcome.observation, "done": outcome.done} | _reward(outcome.reward))


def outcome_from(message: Mapping[str, Any]) -> Outcome:
    """The answer again. KeyError, TypeError or ValueError for anything else."""
    return Outcome(observation=str(message["observation"]), done=bool(message["done"]), reward=reward_from(message))


def reward_line(reward: Reward) -> bytes:
    """One reward."""
    return _line(_reward(reward))


def reward_from(message: Mapping[str, Any]) -> Reward:
    """The reward again. KeyError, TypeError or ValueError for anything else."""
    value, error = message["value"], message["error"]
    parts = {str(name): float(part) for name, part in message["parts"].items()}
    return Reward(
        value=None if value is None else float(value), parts=parts, error=None if error is None else str(error)
    )


def ready_line(name: str, *, one_by_one: bool) -> bytes:
    """The worker has loaded its function."""
    return _line({"ready": name, "one_by_one": one_by_one})


def refused_line(reason: str) -> bytes:
    """The worker cannot load it."""
    return _line({"refused": reason})


def message_of(line: bytes) -> Mapping[str, Any]:
    """One line as it came. ValueError when it is no JSON object."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"not an object: {line[:80]!r}")
    return message


def _reward(reward: Reward) -> dict[str, Any]:
    return {"value": reward.value, "parts": dict(reward.parts), "error": reward.error}


def _request(request: PromptRequest) -> dict[str, Any]:
    return asdict(request) | {"prompt_token_ids": _packed(request.prompt_token_ids, "<i4")}


def _request_of(asked: dict[str, Any]) -> PromptRequest:
    asked["prompt_token_ids"] = _unpacked(asked["prompt_token_ids"], "<i4")
    sampling = asked["sampling"]
    sampling["logit_bias"] = tuple(map(tuple, sampling["logit_bias"]))
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    asked["sampling"] = Sampling(**sampling)
    return PromptRequest(**{**asked, "group_id": GroupId(asked["group_id"])})


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _packed(array: Any, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=np.dtype(dtype)).tobytes()).decode()


def _unpacked(text: str, dtype: str) -> Any:
    array = np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype))
    return array.astype(array.dtype.newbyteorder("="), copy=False)
