"""An environment by name: a shipped one, `package.module:Class`, or `path/to/file.py:Class`.

The class (or function) is called with the configured arguments once for each time an episode is played. The name
that is recorded carries a version: its own attribute `version`, or the digest of its file, and the arguments.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from infra.config_task import EnvironmentEntry
from infra.environment import Episodic
from infra.environment_shipped import Calculator, Guess
from infra.reward_loading import user_object, version_of
from infra.rewards import checked_name
from schemas.errors import ConfigError

SHIPPED: Mapping[str, Callable[..., Any]] = {"calculator": Calculator, "guess": Guess}
"""what comes with the project; version 1 of each"""


def load_environment(entry: EnvironmentEntry) -> Episodic:
    """Ready to be asked. ConfigError says what was looked for and what there is."""
    name = entry.name
    if name in SHIPPED:
        make, version = SHIPPED[name], "1"
    else:
        make, module = user_object(name, kind="environment", shipped=sorted(SHIPPED))
        version = version_of(make, module)
    arguments = json.dumps(entry.arguments, sort_keys=True) if entry.arguments else ""
    made = partial(make, **entry.arguments)
    try:
        one = made()
    except ConfigError:
        raise
    # User code may raise anything while it is made; this is where it becomes a message.
    except Exception as error:
        raise ConfigError(f"environment {name!r} cannot be made: {type(error).__name__}: {error}") from error
    for method in ("reset", "step"):
        if not callable(getattr(one, method, None)):
            raise ConfigError(
                f"environment {name!r}: {type(one).__name__} has no method {method!r} (docs/multi-turn.md)"
            )
    is_async = any(inspect.iscoroutinefunction(getattr(one, method)) for method in ("reset", "step"))
    return Episodic(checked_name(f"{name}{arguments}@{version}"), made, is_async=is_async)
