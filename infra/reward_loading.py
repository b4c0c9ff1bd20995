"""A reward function by name: a shipped one, `package.module:function`, or `path/to/file.py:function`.

A function of one's own takes (request, completion) and returns a number, or (number, parts); or (request,
completions) and returns a list; either may be async (docs/own-task.md). Its code is appended to the import path,
never put before ours. The name that is recorded carries a version: its own, or the file's digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from infra.config_task import RewardEntry, Scalar
from infra.countdown import judge, parse
from infra.ports import Completion, Reward, RewardFunction
from infra.reward_shipped import (
    Weighted,
    WeightedSum,
    exact_reward,
    format_reward,
    length_reward,
    math_reward,
    number_reward,
    soft_overlong_reward,
)
from infra.rewards import ABORTED, GuardedReward, Parts, checked_name, countdown_reward, failed, reward_of
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest


def load_rewards(entries: Sequence[RewardEntry]) -> RewardFunction:
    """One reward as it is; several as their weighted sum."""
    if len(entries) == 1 and entries[0].weight == 1.0:
        return load_reward(entries[0].name, entries[0].arguments)
    return WeightedSum(
        [
            Weighted(label=entry.name, weight=entry.weight, function=load_reward(entry.name, entry.arguments))
            for entry in entries
        ]
    )


def load_reward(name: str, arguments: Mapping[str, Scalar] | None = None) -> RewardFunction:
    """The reward function of that name. ConfigError says what was looked for and what there is."""
    given = dict(arguments or {})
    if name in SHIPPED:
        try:
            return SHIPPED[name](**given)
        except TypeError as error:
            raise ConfigError(f"reward function {name!r}: arguments: {error}") from error
    function, module = user_object(name, kind="reward function", shipped=sorted(SHIPPED))
    return UserReward(f"{name}@{version_of(function, module)}", function, given)


def user_object(name: str, *, kind: str, shipped: Sequence[str]) -> tuple[Callable[..., Any], ModuleType]:
    """What user code has under `package.module:name` or `path/to/file.py:name`, and its module.

    `kind` and `shipped` (names that would have been taken) are for the ConfigError.
    """
    module_name, colon, function_name = name.rpartition(":")
    if not (colon and module_name and function_name):
        raise ConfigError(
            f"{kind} {name!r}: use one of {', '.join(shipped)}, package.module:function, or path/to/file.py:function"
        )
    module = _module(module_name, f"{kind} {name!r}")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{kind} {name!r}: {module_name} has no function {function_name!r}")
    return function, module


class UserReward:
    """RewardFunction over user code of any of the four shapes: one completion or a group, sync or async."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Scalar]) -> None:
        self.name = checked_name(name)
        self._function = function
        self._arguments = dict(arguments)
        self._batched = is_batched(function)
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )

    @property
    def one_by_one(self) -> bool:
        """Each completion is a call of its own, so that one of them cannot take the others with it."""
        return not (self._batched or self._async)

    def score(self, request: PromptRequest, completions: Sequence[Completion]) -> Sequence[Reward]:
        """One Reward per completion, in order. Never raises."""
        whole = [place for place, completion in enumerate(completions) if completion.finish_reason != "abort"]
        rewards = [ABORTED] * len(completions)
        chosen = [completions[place] for place in whole]
        for place, reward in zip(whole, self._judged(request, chosen) if chosen else (), strict=True):
            rewards[place] = reward
        return rewards

    def _judged(self, request: PromptRequest, completions: Sequence[Completion]) -> list[Reward]:
        try:
            if self._batched:
                found = self._function(request, completions, **self._arguments)
                return _counted(asyncio.run(found) if inspect.iscoroutine(found) else found, len(completions))
            if self._async:
                return asyncio.run(self._gathered(request, completions))
        # User code may raise anything; this is the boundary where it becomes a recorded failure.
        except Exception as error:  # noqa: BLE001
            return [failed(f"{type(error).__name__}: {error}")] * len(completions)
        return [self._one(request, completion) for completion in completions]

    def _one(self, request: PromptRequest, completion: Completion) -> Reward:
        try:
            found = self._function(request, completion, **self._arguments)
        except Exception as error:  # noqa: BLE001 (as above)
            return failed(f"{type(error).__name__}: {error}")
        return reward_of(found)

    async def _gathered(self, request: PromptRequest, completions: Sequence[Completion]) -> list[Reward]:
        calls: list[Coroutine[Any, Any, Any]] = [self._function(request, c, **self._arguments) for c in completions]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return [
            failed(f"{type(one).__name__}: {one}") if isinstance(one, BaseException) else reward_of(one)
            for one in found
        ]


def is_batched(function: Callable[..., Any]) -> bool:
    """Takes a whole group: it says so by an attribute `batched`, or its second parameter is named `completions`."""
    declared = getattr(function, "batched", None)
    if declared is not None:
        return bool(declared)
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False  # a builtin without a signature
    return len(names) > 1 and names[1] == "completions"


def _counted(found: Any, count: int) -> list[Reward]:
    """What a batched function returned; a list of another length says nothing about anybody."""
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
        return [failed(f"a batched reward returned {type(found).__name__}: return a list")] * count
    values = list(found)
    if len(values) != count:
        return [failed(f"a batched reward returned {len(values)} values for {count} completions")] * count
    return [reward_of(value) for value in values]


def countdown_partial_reward() -> GuardedReward:
    """As countdown@1, and 0.1 for an expression that can be read and is wrong."""
    return GuardedReward("countdown-partial@1", _judge_partly)


SHIPPED: Mapping[str, Callable[..., RewardFunction]] = {
    "countdown": countdown_reward,
    "countdown@1": countdown_reward,
    "countdown-partial": countdown_partial_reward,
    "countdown-partial@1": countdown_partial_reward,
    "exact": exact_reward,
    "format": format_reward,
    "length": length_reward,
    "math": math_reward,
    "number": number_reward,
    "soft-overlong": soft_overlong_reward,
}
"""what comes with the project"""


def _judge_partly(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
    if completion.text is None:
        raise ValueError("the completion has no text: it must be decoded for this reward")
    numbers = [int(number) for number in request.reference["numbers"].split(",")]
    well_formed = float(parse(completion.text) is not None)
    right = float(judge(completion.text, numbers, int(request.reference["target"])))
    return max(right, 0.1 * well_formed), {"right": right, "well_formed": well_formed}


def _module(module_name: str, what: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            return _from_file(Path(module_name))
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)
        return importlib.import_module(module_name)
    # User code may raise anything while it is imported; this is where it becomes a message.
    except Exception as error:
        raise ConfigError(f"{what}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version_of(function: object, module: ModuleType) -> str:
    """Its own, or the digest of its file."""
    own = getattr(function, "version", None)
    if own is not None:
        return str(own)
    source = inspect.getsourcefile(module)
    if source is None or not Path(source).is_file():
        return "unversioned"
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]
