"""What an environment of one's own is written with (docs/multi-turn.md)."""

from infra.environment import Environment, Start, Turn
from infra.ports import Reward
from schemas.trajectory import PromptRequest

__all__ = ["Environment", "PromptRequest", "Reward", "Start", "Turn"]
