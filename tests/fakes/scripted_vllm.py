"""A VllmCore that computes nothing: it records what it is asked, and a test says what comes back and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from producers.engines.vllm_core import Answer, Ask
from schemas.errors import EngineLost


class ScriptedVllm:
    """Every request of `begun` stays in flight until `answer` or `stop_all`."""

    build = "cpu"
    version = "0.32.0+cpu"
    block = 16
    max_tokens = 64

    def __init__(self, ring: Callable[[], None]) -> None:
        self.ring = ring
        self.begun: list[Ask] = []
        self.flying: dict[int, tuple[Ask, list[int]]] = {}
        self.ready: list[Answer] = []
        self.calls: list[str] = []
        self.label = ""
        self.salt = ""
        self.fails_at = ""
        self.closed = False

    # ------------------------------------------------------------ for the test

    def sample(self, key: int, tokens: Sequence[int]) -> None:
        """These tokens are sampled, and the request goes on."""
        self.flying[key][1].extend(tokens)

    def answer(self, key: int, reason: str, **changes: Any) -> None:
        """The request has ended."""
        _, tokens = self.flying.pop(key)
        fields: dict[str, Any] = {
            "key": key,
            "token_ids": tokens,
            "logprobs": [-1.0] * len(tokens),
            "finish_reason": reason,
            "spans": [(self.label, 0, len(tokens))] if tokens else [],
            "prompt_logprobs": [],
        }
        self.ready.append(Answer(**{**fields, **changes}))
        self.ring()

    # ------------------------------------------------------------ the core

    def start(self, directory: Path, label: str, positions: int) -> None:
        self._called("start")
        self.label = label

    def stage(self, paths: Sequence[Path], shapes: Mapping[str, Sequence[int]]) -> None:
        self._called("stage")

    def clear(self) -> None:
        assert not self.flying, "cleared under running requests"
        self._called("clear")

    def swap(self, rotated: Sequence[str] = ()) -> None:
        assert self.calls[-1] == "clear", "swapped without a clear before it"
        self._called("swap")

    def serve(self, label: str, salt: str) -> None:
        self._called("serve")
        self.label, self.salt = label, salt

    def begin(self, asks: Sequence[Ask]) -> None:
        self.begun += asks
        self.flying.update({ask.key: (ask, []) for ask in asks})

    def take(self) -> list[Answer]:
        taken, self.ready = self.ready, []
        return taken

    def stop_all(self) -> Future[None]:
        self.calls.append("stop_all")
        for key in list(self.flying):
            self.answer(key, "abort")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check(self) -> None:
        if self.closed:
            raise EngineLost("closed")

    def close(self) -> None:
        self.closed = True

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise EngineLost(f"{name} failed (planted)")
