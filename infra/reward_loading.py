"""A reward function by name: a shipped one, `package.module:function`, or `path/to/file.py:function`.

A function of one's own takes (request, completion) and returns a number, or (number, parts). Its code is appended to
the import path, never put before ours. The name that is recorded carries a version: its own, or the file's digest.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from infra.countdown import judge, parse
from infra.ports import Completion, RewardFunction
from infra.rewards import GuardedReward, Parts, countdown_reward
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest


def load_reward(name: str) -> RewardFunction:
    """The reward function of that name. ConfigError says what was looked for and what there is."""
    if name in SHIPPED:
        return SHIPPED[name]()
    module_name, colon, function_name = name.rpartition(":")
    if not (colon and module_name and function_name):
        raise ConfigError(
            f"reward function {name!r}: use one of {', '.join(sorted(SHIPPED))}, package.module:function, or "
            "path/to/file.py:function"
        )
    module = _module(module_name, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward function {name!r}: {module_name} has no function {function_name!r}")
    return GuardedReward(f"{name}@{_version(function, module)}", _judge_by(function))


def countdown_partial_reward() -> GuardedReward:
    """As countdown@1, and 0.1 for an expression that can be read and is wrong."""
    return GuardedReward("countdown-partial@1", _judge_partly)


SHIPPED: Mapping[str, Callable[[], RewardFunction]] = {
    "countdown": countdown_reward,
    "countdown@1": countdown_reward,
    "countdown-partial": countdown_partial_reward,
    "countdown-partial@1": countdown_partial_reward,
}
"""what comes with the project"""


def _judge_partly(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
    if completion.text is None:
        raise ValueError("the completion has no text: it must be decoded for this reward")
    numbers = [int(number) for number in request.reference["numbers"].split(",")]
    well_formed = float(parse(completion.text) is not None)
    right = float(judge(completion.text, numbers, int(request.reference["target"])))
    return max(right, 0.1 * well_formed), {"right": right, "well_formed": well_formed}


def _judge_by(function: Callable[..., Any]) -> Callable[[PromptRequest, Completion], tuple[float, Parts]]:
    def judge_one(request: PromptRequest, completion: Completion) -> tuple[float, Parts]:
        found = function(request, completion)
        return (found[0], found[1]) if isinstance(found, tuple) else (found, {})

    return judge_one


def _module(module_name: str, name: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            return _from_file(Path(module_name))
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)
        return importlib.import_module(module_name)
    # User code may raise anything while it is imported; this is where it becomes a message.
    except Exception as error:
        raise ConfigError(
            f"reward function {name!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


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


def _version(function: object, module: ModuleType) -> str:
    own = getattr(function, "version", None)
    if own is not None:
        return str(own)
    source = inspect.getsourcefile(module)
    if source is None or not Path(source).is_file():
        return "unversioned"
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]
