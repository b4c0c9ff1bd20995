"""An engine whose turns are written down, and an environment that answers when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from infra.environment import Ask, Episodic, Outcome, Start, Turn
from infra.ports import Completion, EngineRequest
from schemas.trajectory import Segment

STOP = 0


@dataclass(slots=True, kw_only=True)
class TurnEngine:
    """The GenerationEngine port: a turn is letters of `script` and the stop token, one step of `poll` a turn.

    `script`: (member, number of its turn) -> text; a token is the letter's code. Versions and proofs are told.
    """

    script: Callable[[int, int], str]
    version: int = 3
    proof: int = 30
    turns_per_poll: int | None = None
    """None: all that run"""
    queue: list[EngineRequest] = field(default_factory=list)
    running: list[tuple[EngineRequest, int]] = field(default_factory=list)
    asked: list[EngineRequest] = field(default_factory=list)
    turns: dict[tuple[str, int], int] = field(default_factory=dict)
    paused: str | None = None
    finish: Literal["stop", "abort"] = "stop"
    has_text: bool = True
    closed: bool = False

    def submit(self, request: EngineRequest) -> None:
        self.queue.append(request)
        self.asked.append(request)

    def poll(self) -> Sequence[Completion]:
        if self.paused == "keep":
            return []
        self.running += [(request, member) for request in self.queue for member in request.members]
        self.queue.clear()
        count = len(self.running) if self.turns_per_poll is None else self.turns_per_poll
        ended, self.running = self.running[:count], self.running[count:]
        return [self._turn(request, member) for request, member in ended]

    def _turn(self, request: EngineRequest, member: int) -> Completion:
        group_id = str(request.request.group_id)
        number = self.turns[group_id, member] = self.turns.get((group_id, member), -1) + 1
        whole = [*map(ord, self.script(member, number)), STOP]
        tokens = whole[: request.new_tokens]
        return Completion(
            group_id=group_id,
            index_in_group=member,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -0.5 - number, dtype=np.float32),
            segments=(Segment(version=self.version, length=len(tokens), proof=self.proof),),
            finish_reason=("length" if len(tokens) < len(whole) else self.finish),
            text="".join(chr(token) for token in tokens if token != STOP) if self.has_text else None,
            started_at_us=100 + number,
            finished_at_us=200 + number,
        )

    def busy(self) -> bool:
        return bool(self.queue or self.running)

    def running_groups(self) -> frozenset[str]:
        return frozenset(str(one.request.group_id) for one in (*self.queue, *(one for one, _ in self.running)))

    def pause(self, mode: Literal["finish", "keep"]) -> None:
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    def load(self, directory: Path, version: int) -> None:
        self.version = version

    def set_proof(self, proof: int) -> None:
        self.proof = proof

    def weights_touched(self) -> bool:
        return False

    def score(self, token_ids: Any, prompt_lengths: Any) -> Any:
        return ["scored", token_ids, prompt_lengths]

    def generate_greedily(self, prompts: Any, tokens: int) -> Any:
        return ["greedy", prompts, tokens]

    def prefix_block(self) -> int:
        return 16

    def identity(self) -> Mapping[str, str]:
        return {"engine": "turns"}

    def close(self) -> None:
        self.closed = True


class Echo:
    """Says `<text>` after each turn; ends with reward 1 at a turn `end`, counts 0.25 for every other turn."""

    opening: str | None = None

    def reset(self, start: Start) -> str | None:
        return self.opening

    def step(self, text: str) -> Turn:
        if text == "raise":
            raise ValueError("no such tool")
        if text == "end":
            return Turn(observation="unseen", done=True, reward=1.0, parts={"ended": 1.0})
        return Turn(observation=f"<{text}>", reward=0.25, parts={"ended": 0.0, "length": len(text)})


class Asked:
    """EnvironmentPort that answers at once, or when `answer` is called where it is `slow`."""

    def __init__(self, make: Callable[[], Any] = Echo, *, slow: bool = False) -> None:
        self.name = "echo@1"
        self.slow = slow
        self.asks: list[Ask] = []
        self.closed = False
        self._environment = Episodic(self.name, make, is_async=False)
        self._open: list[tuple[Sequence[Ask], Future[Sequence[Outcome]]]] = []

    def ask(self, asks: Sequence[Ask]) -> Future[Sequence[Outcome]]:
        future: Future[Sequence[Outcome]] = Future()
        self.asks += asks
        self._open.append((asks, future))
        if not self.slow:
            self.answer()
        return future

    def answer(self, members: Sequence[int] | None = None) -> None:
        """Answer what is asked, or what is asked for these members."""
        for entry in list(self._open):
            asks, future = entry
            if members is None or {one.member for one in asks} <= set(members):
                self._open.remove(entry)
                future.set_result(self._environment.answers(asks))

    def close(self) -> None:
        self.closed = True
