"""A GenerationEngine that plays episodes: the engine samples a turn, the environment answers, and so on to the end.

Wraps any engine and promises what one promises, member for member: one Completion with the tokens of all turns, the
observations between them masked, and the environment's reward. Never waits for the environment. A group counts as
running until its last episode is over, also while an environment thinks, so a drain lets whole episodes end under the
weights they began with; a switch that keeps them gives a later turn a segment of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from infra.environment import Ask, EnvironmentPort, Outcome
from infra.ports import Completion, EngineRequest, GenerationEngine, Reward
from infra.rewards import ABORTED, failed
from producers.episode_record import EpisodeRecord
from schemas.errors import IllegalState

Encode = Callable[[str], Sequence[int]]
"""an observation's text -> its tokens, with what stands around it; ValueError when it cannot be said"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """The limits of an episode; sampling.max_tokens of its request bounds its tokens, observations included."""

    max_turns: int
    in_step: bool
    """a group's next turns begin together, once all its members are ready: what is sampled then depends on weights and
    request alone, in an engine that promises that for groups. False: each member goes on as soon as it can"""


@dataclass(slots=True, kw_only=True)
class _Episodes:
    """The members of one group that are not over."""

    asked: EngineRequest
    records: dict[int, EpisodeRecord]
    sampling: set[int] = field(default_factory=set)
    """members the engine is at"""
    thinking: list[tuple[Future[Sequence[Outcome]], tuple[int, ...]]] = field(default_factory=list)
    """what the environment is asked, for which members"""
    ready: list[int] = field(default_factory=list)
    """members whose next turn can be sampled"""
    failures: dict[int, Reward] = field(default_factory=dict)
    """members whose environment did not open: they end after a turn, since a trajectory has at least one token"""


class EpisodeEngine:
    """See the module."""

    def __init__(
        self, engine: GenerationEngine, environment: EnvironmentPort, encode: Encode, settings: EpisodeSettings
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._encode = encode
        self._s = settings
        self._groups: dict[str, _Episodes] = {}
        self._held: deque[EngineRequest] = deque()
        """submitted after pause("finish"): begins after resume"""
        self._paused: Literal["finish", "keep"] | None = None
        self._closed = False

    # ------------------------------------------------------------ generation

    def submit(self, request: EngineRequest) -> None:
        """Begin the episodes of one group."""
        if request.member is not None or request.context:
            raise IllegalState(f"{request.request.group_id}: an episode begins with its group and its prompt")
        if self._paused == "finish":
            self._held.append(request)
        else:
            self._begin(request)

    def poll(self) -> Sequence[Completion]:
        """Hear what environments say, let the engine do one step, and return the members whose episode is over."""
        if self._closed:
            return []
        finished: list[Completion] = []
        for group in list(self._groups.values()):
            self._hear(group, finished)
            self._go_on(group)
        by_group: dict[str, list[Completion]] = {}
        for completion in self._engine.poll():
            by_group.setdefault(completion.group_id, []).append(completion)
        for group_id, turns in by_group.items():
            self._sampled(self._groups[group_id], turns, finished)
        for group_id in [name for name, group in self._groups.items() if not group.records]:
            del self._groups[group_id]
        self._pass_on_finish()
        return finished

    def busy(self) -> bool:
        """`poll` has something to do. False while everybody waits for an environment: see running_groups."""
        return self._can_go_on() or self._engine.busy() or bool(self._held)

    def computes_alone(self) -> bool:
        """As the engine's, while no turn can begin or end."""
        return self._engine.computes_alone() and not self._can_go_on()

    def _can_go_on(self) -> bool:
        groups = self._groups.values()
        return any(group.ready or any(future.done() for future, _ in group.thinking) for group in groups)

    def running_groups(self) -> frozenset[str]:
        """Groups with an episode that is not over: queued, sampled, or waiting for its environment."""
        return frozenset(self._groups) | {str(request.request.group_id) for request in self._held}

    # ------------------------------------------------------------ switching weights

    def pause(self, mode: Literal["finish", "keep"]) -> None:
        """finish: episodes that began end through `poll`, later groups wait; keep: freeze at once."""
        self._paused = mode
        if mode == "keep":
            self._engine.pause("keep")
        self._pass_on_finish()

    def _pass_on_finish(self) -> None:
        # Not before the last episode is over: an engine that was told to finish would hold back their next turns.
        if self._paused == "finish" and not self._groups:
            self._engine.pause("finish")

    def resume(self) -> None:
        """Go on after pause."""
        self._paused = None
        self._engine.resume()
        while self._held:
            self._begin(self._held.popleft())

    def load(self, directory: Path, version: int) -> None:
        """As the engine's."""
        self._engine.load(directory, version)

    def weights_touched(self) -> bool:
        """As the engine's."""
        return self._engine.weights_touched()

    def set_proof(self, proof: int) -> None:
        """As the engine's."""
        self._engine.set_proof(proof)

    def score(
        self, token_ids: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> Sequence[npt.NDArray[np.float32]]:
        """As the engine's."""
        return self._engine.score(token_ids, prompt_lengths)

    def prefix_block(self) -> int:
        """As the engine's."""
        return self._engine.prefix_block()

    def generate_greedily(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        """As the engine's: no environment has a part in it."""
        return self._engine.generate_greedily(prompts, tokens)

    def identity(self) -> Mapping[str, str]:
        """As the engine's."""
        return self._engine.identity()

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        self._closed = True
        self._groups.clear()
        self._held.clear()
        self._environment.close()
        self._engine.close()

    # ------------------------------------------------------------ turns

    def _begin(self, request: EngineRequest) -> None:
        group_id = str(request.request.group_id)
        records = {index: EpisodeRecord(group_id=group_id, index_in_group=index) for index in request.members}
        group = self._groups[group_id] = _Episodes(asked=request, records=records)
        self._ask(group, sorted(records))

    def _ask(self, group: _Episodes, members: Sequence[int]) -> None:
        asks = [
            Ask(
                request=group.asked.request,
                member=index,
                seed=group.asked.rng_seed,
                texts=tuple(group.records[index].texts),
                observations=tuple(group.records[index].observations),
            )
            for index in members
        ]
        group.thinking.append((self._environment.ask(asks), tuple(members)))

    def _hear(self, group: _Episodes, finished: list[Completion]) -> None:
        """What the environment has answered: an episode is over, or its next turn can begin."""
        done = [entry for entry in group.thinking if entry[0].done()]
        group.thinking = [entry for entry in group.thinking if not entry[0].done()]
        for future, members in done:
            for index, outcome in zip(members, future.result(0.0), strict=True):
                record = group.records[index]
                limit = group.asked.request.sampling.max_tokens
                if record.turns == 0:
                    failure = opened(record, outcome, self._encode, limit)
                    if failure is not None:
                        group.failures[index] = failure
                    group.ready.append(index)
                    continue
                end = ended(record, outcome, self._encode, limit=limit, max_turns=self._s.max_turns)
                if end is None:
                    group.ready.append(index)
                else:
                    finished.append(group.records.pop(index).completion(end))

    def _go_on(self, group: _Episodes) -> None:
        """Submit the turns that can begin."""
        if not group.ready or (self._s.in_step and (group.sampling or group.thinking)):
            return
        members, group.ready = sorted(group.ready), []
        group.sampling.update(members)
        asked = group.asked
        if len(members) == asked.request.group_size and not any(group.records[index].token_ids for index in members):
            self._engine.submit(asked)
            return
        for index in members:
            context = group.records[index].context
            self._engine.submit(
                EngineRequest(request=asked.request, rng_seed=asked.rng_seed, member=index, context=context)
            )

    def _sampled(self, group: _Episodes, turns: Sequence[Completion], finished: list[Completion]) -> None:
        """Turns that the engine has ended."""
        asking: list[int] = []
        for turn in turns:
            index = turn.index_in_group
            group.records[index].add_turn(turn)
            group.sampling.discard(index)
            failure = ABORTED if turn.finish_reason == "abort" else group.failures.get(index)
            if failure is None and turn.text is None:
                failure = failed("the turn has no text: the engine must decode for an environment")
            if failure is None:
                asking.append(index)
            else:
                finished.append(group.records.pop(index).completion(failure))
        if asking:
            self._ask(group, asking)


def opened(record: EpisodeRecord, outcome: Outcome, encode: Encode, limit: int) -> Reward | None:
    """Put the opening into the record. A failure: the episode ends after one turn, with that."""
    tokens: list[int] = []
    failure: Reward | None = None
    if outcome.failed:
        failure = outcome.reward
    elif outcome.observation:
        try:
            tokens = list(encode(outcome.observation))
        except ValueError as error:
            failure = failed(str(error))
        if len(tokens) >= limit:
            failure = failed(
                f"the opening has {len(tokens)} tokens: task.max_tokens = {limit} leaves no room for a turn"
            )
    if failure is not None:
        record.observations.append("")
        return failure
    record.observations.append(outcome.observation)
    record.add_observation(outcome.observation, tokens)
    return None


def ended(record: EpisodeRecord, outcome: Outcome, encode: Encode, *, limit: int, max_turns: int) -> Reward | None:
    """The reward of an episode that is over after its last turn; None: it goes on, the observation in its record.

    An observation that nothing would be sampled after is left out: an episode ends with what the policy said.
    """
    if outcome.failed or outcome.done or record.turns >= max_turns or record.finish_reason == "length":
        return outcome.reward
    try:
        tokens = list(encode(outcome.observation))
    except ValueError as error:
        return failed(str(error))
    if len(record.token_ids) + len(tokens) >= limit:
        record.finish_reason = "length"
        return outcome.reward
    record.observations.append(outcome.observation)
    record.add_observation(outcome.observation, tokens)
    return None
