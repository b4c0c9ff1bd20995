"""A reward process: loads the configured rewards, scores what it is sent, dies with its generator.

Started by infra/reward_processes.py. Whatever user code does here (raise, exit, crash, loop, print) ends at worst
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
from collections.abc import Iterator

from infra.config_task import RewardEntry
from infra.ports import RewardFunction
from infra.reward_loading import UserReward, load_rewards
from infra.reward_shipped import WeightedSum
from infra.reward_wire import job_of, ready_line, refused_line, reward_line
from schemas.errors import ConfigError

# The generator kills a call that is too long. Should it be gone or stuck itself, this ends the process from outside
# of the interpreter (user code may hold its lock for ever), and says where it was.
_BACKSTOP_S = 30.0


def main(fd: int, entries_json: str, timeout_s: float) -> None:
    """Serve until the other end is closed."""
    connection = socket.socket(fileno=fd)
    entries = [RewardEntry.model_validate(entry) for entry in json.loads(entries_json)]
    try:
        function = load_rewards(entries)
    except ConfigError as error:
        connection.sendall(refused_line(str(error)))
        return
    one_by_one = goes_one_by_one(function)
    connection.sendall(ready_line(function.name, one_by_one=one_by_one))
    for line in _lines(connection):
        request, completions = job_of(line)
        for call in [[c] for c in completions] if one_by_one else [completions]:
            faulthandler.dump_traceback_later(timeout_s + _BACKSTOP_S, exit=True)
            rewards = function.score(request, call)
            faulthandler.cancel_dump_traceback_later()
            connection.sendall(b"".join(map(reward_line, rewards)))


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
