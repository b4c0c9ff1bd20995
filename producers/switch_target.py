"""Which weights a worker should hold next, as a function of the policy fold. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.policy_fold import PolicyFold
from schemas.policy_state import Standing, WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """A version to load and prove."""

    switch: str | None
    """the open switch that requires it; None: as a late joiner, outside of any switch"""
    version: int


def load_target(fold: PolicyFold, me: WorkerKey, held: int | None) -> LoadTarget | None:
    """The next version to load, or None when there is nothing to do but serve or wait.

    Args: held: version whose proof by this incarnation is legal; None: no proven weights.
    """
    if fold.ended or not fold.is_current(me):
        return None
    switch = fold.switch
    if switch is not None and me in switch.remaining:
        if me in switch.acks:
            return None
        return LoadTarget(switch=switch.event.switch, version=switch.event.version)
    if fold.live is None:
        return None
    state = fold.workers[me[0]]
    if state.standing is Standing.JOINED:
        if state.late_ack is not None and state.late_ack[0] == fold.live:
            return None
        return LoadTarget(switch=None, version=fold.live)
    if held is None or (held != fold.live and switch is None):
        return LoadTarget(switch=None, version=fold.live)
    return None


def may_sample(fold: PolicyFold, held: int | None, *, rolling: bool = False) -> bool:
    """The weights in the engine may produce tokens: proven, and in barrier mode live at some time.

    The trainer's admission is the guarantee (G3); this keeps a worker from wasting work.
    """
    return held is not None and (rolling or fold.was_activated(held))


def may_serve(fold: PolicyFold, me: WorkerKey, held: int | None, *, rolling: bool = False) -> bool:
    """The worker may take requests: it is admitted and may sample."""
    if fold.ended or not fold.is_current(me):
        return False
    return fold.workers[me[0]].standing is Standing.ADMITTED and may_sample(fold, held, rolling=rolling)
