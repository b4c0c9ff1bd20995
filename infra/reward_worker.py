"""A reward process: loads the rewards or the environment, answers what it is sent, dies with its generator.

Started by infra/reward_process.py. Whatever user code does here (raise, exit, crash, loop, print) ends at worst
this process. Its standard output is the generator's standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from infra.config_task import EnvironmentEntry, RewardEntry
from infra.environment import Ask
from infra.environment_loading import load_environment
from infra.ports import Completion, RewardFunction
from infra.reward_loading import UserReward, load_rewards
from infra.reward_shipped import WeightedSum
from infra.reward_wire import asks_of, job_of, outcome_line, ready_line, refused_line, reward_line
from schemas.errors import ConfigError
from schemas.trajectory import PromptRequest

# The generator kills a call that is too long. Should it be gone or stuck itself, this ends the process from outside
# of the interpreter (user code may hold its lock for ever), and says where it was.
_BACKSTOP_S = 30.0


def main(fd: int, served_json: str, timeout_s: float) -> None:
    """Serve until the other end is closed."""
    connection = socket.socket(fileno=fd)
    try:
        served = _loaded(json.loads(served_json))
    except ConfigError as error:
        connection.sendall(refused_line(str(error)))
        return
    connection.sendall(ready_line(served.name, one_by_one=served.one_by_one))
    for line in _lines(connection):
        for call in served.calls(line):
            faulthandler.dump_traceback_later(timeout_s + _BACKSTOP_S, exit=True)
            answer = call()
            faulthandler.cancel_dump_traceback_later()
            connection.sendall(answer)


class _Served(Protocol):
    """What a worker answers with."""

    name: str
    one_by_one: bool

    def calls(self, line: bytes) -> list[Callable[[], bytes]]:
        """What one job asks of user code, call by call; each gives its lines."""
        ...


def _loaded(served: dict[str, Any]) -> _Served:
    if served["environment"] is not None:
        return _Environment(EnvironmentEntry.model_validate(served["environment"]))
    return _Rewards([RewardEntry.model_validate(entry) for entry in served["rewards"]])


class _Rewards:
    def __init__(self, entries: Sequence[RewardEntry]) -> None:
        self._function = load_rewards(entries)
        self.name, self.one_by_one = self._function.name, goes_one_by_one(self._function)

    def calls(self, line: bytes) -> list[Callable[[], bytes]]:
        request, completions = job_of(line)
        parts = [[c] for c in completions] if self.one_by_one else [completions]
        return [partial(self._call, request, part) for part in parts]

    def _call(self, request: PromptRequest, completions: Sequence[Completion]) -> bytes:
        return b"".join(map(reward_line, self._function.score(request, completions)))


class _Environment:
    def __init__(self, entry: EnvironmentEntry) -> None:
        self._environment = load_environment(entry)
        self.name, self.one_by_one = self._environment.name, self._environment.one_by_one

    def calls(self, line: bytes) -> list[Callable[[], bytes]]:
        asks = asks_of(line)
        return [partial(self._call, part) for part in ([[a] for a in asks] if self.one_by_one else [asks])]

    def _call(self, asks: Sequence[Ask]) -> bytes:
        return b"".join(map(outcome_line, self._environment.answers(asks)))


def goes_one_by_one(function: RewardFunction) -> bool:
    """Whether completions may be sent to it one at a time without changing what it does."""
    if isinstance(function, WeightedSum):
        return all(goes_one_by_one(term.function) for term in function.terms)
    return function.one_by_one if isinstance(function, UserReward) else True


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Jobs as they come, read by a thread of its own: it notices the generator's end while user code is at work."""
    jobs: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        with connection.makefile("rb") as stream:
            for line in stream:
                jobs.put(line)
        os._exit(0)

    threading.Thread(target=read, name="jobs", daemon=True).start()
    while True:
        yield jobs.get()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
