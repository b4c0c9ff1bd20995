"""Episodes in the simulator: a worker's engine with an environment that answers after a while of virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future

from infra.environment import Ask, Outcome
from producers.episodes import EpisodeEngine, EpisodeSettings
from tests.fakes.tiny_policy import TinyEngine
from tests.fakes.virtual_clock import VirtualClock
from tests.sim.surroundings import LateFuture

SLOWEST_S = 0.3
"""of an answer: slower, and a lone worker with one group in flight cannot keep up with the groups' time-out"""
OBSERVATION = (3, 4)


class LateEnvironment:
    """EnvironmentPort: done after `turns` turns, or after one in every fourth episode."""

    name = "late@1"

    def __init__(self, turns: int, clock: VirtualClock) -> None:
        self._turns = turns
        self._clock = clock

    def ask(self, asks: Sequence[Ask]) -> Future[Sequence[Outcome]]:
        """After a time that follows from what is asked."""
        now_s = self._clock.monotonic_s()
        delay_s = SLOWEST_S * _chance(f"{asks[0].request.group_id}/{asks[0].member}/{len(asks[0].texts)}")
        return LateFuture(now_s + delay_s, self._clock, lambda: [self._outcome(ask) for ask in asks])

    def _outcome(self, ask: Ask) -> Outcome:
        short = _chance(f"short/{ask.request.group_id}/{ask.member}") < 0.25
        said = "more" if ask.texts else ""
        return Outcome(observation=said, done=len(ask.texts) >= (1 if short else self._turns))

    def close(self) -> None:
        """Nothing to release."""


class TinyEpisodes(EpisodeEngine):
    """What the faults of the simulator reach into is the tiny engine's."""

    def __init__(self, engine: TinyEngine, turns: int, batching: str, clock: VirtualClock) -> None:
        settings = EpisodeSettings(max_turns=turns, in_step=batching == "group")
        super().__init__(engine, LateEnvironment(turns, clock), lambda text: OBSERVATION, settings)
        self._tiny = engine

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("fail_load", "in_background"):
            setattr(self._tiny, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def in_background(self) -> bool:
        """Of the tiny engine."""
        return self._tiny.in_background


def _chance(name: str) -> float:
    return hashlib.sha256(name.encode()).digest()[0] / 256.0
