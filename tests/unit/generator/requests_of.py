"""Prompt requests as a worker reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from infra.ports import Message
from schemas.ids import GroupId
from schemas.prompt_codec import encode_request, request_headers
from schemas.trajectory import PromptRequest, Sampling


def request_of(position: int, **changes: Any) -> PromptRequest:
    """Request i asks for prompt i."""
    values: dict[str, Any] = {
        "group_id": GroupId(f"demo/p{position:06d}/e0/a0"), "request_position": position, "prompt_id": f"t{position}",
        "task": "tiny", "epoch": 0, "attempt": 0, "group_size": 4, "prompt_token_ids": np.array([1, 2], dtype=np.int32),
        "sampling": Sampling(max_tokens=4), "intended_step": 0, "min_version": 0,
        "fallback_version": 0, "issued_at_us": 0,
    } | changes  # fmt: skip
    return PromptRequest(**values)


def request_message(position: int, **changes: Any) -> Message:
    """The record of such a request, in its partition."""
    request = request_of(position, **changes)
    value = encode_request(request)
    return Message(
        topic="demo.prompts",
        key=request.group_id.encode(),
        value=value,
        headers=request_headers(request, value, "trainer"),
        partition=position % 16,
    )
