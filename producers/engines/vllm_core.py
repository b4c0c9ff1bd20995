"""The running vLLM: an AsyncLLM on an event loop in a thread of its own, behind calls that have limits.

The one module that starts vLLM (the import happens there, not before). Guarantees: no call waits without a
limit; a result is rung for as soon as it is there; nothing of vLLM outlives `close`, or this process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from infra.logs import event
from producers.engines.vllm_settings import (
    TRIED_RELEASES,
    VllmEngineSettings,
    engine_arguments,
    engine_environment,
    installed_build,
)
from schemas.errors import EngineLost, EnvironmentMissing

log = logging.getLogger(__name__)
T = TypeVar("T")

_CLOSE_LIMIT_S = 20.0
_CORE_CLOSE_S = 1.0
"""given to vLLM's core before it is killed: there is nothing that it could lose"""
_ABORT_AGAIN_S = 0.05
"""a request on its way into the core cannot be aborted yet: it is tried again after that"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request to vLLM."""

    key: int
    """comes back with the answer"""
    token_ids: Sequence[int]
    arguments: Mapping[str, Any]
    """of vLLM's SamplingParams"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of it."""

    key: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """stop | length | abort"""
    spans: list[tuple[str, int, int]]
    """(label of the weights, first token, behind the last) as the engine recorded them while it sampled"""
    prompt_logprobs: list[float]
    """[P - 1] where they were asked for"""


class VllmCore:
    """See the module. `begin`, `take` and `running` belong to one thread; the rest may be called from any."""

    def __init__(self, settings: VllmEngineSettings, ring: Callable[[], None]) -> None:
        """EnvironmentMissing when vLLM is not installed, or not in a release that was tried."""
        self.settings = settings
        self.build, version = installed_build()
        if not version.startswith(TRIED_RELEASES):
            raise EnvironmentMissing(
                f"vllm {version} is installed; switching weights is proven for {TRIED_RELEASES}* only: install one"
            )
        self.version = f"{version}+{self.build}"
        self._ring = ring
        self._engine: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._results: SimpleQueue[Answer] = SimpleQueue()
        self._running = 0
        self._names = itertools.count()
        self._salt = "start"
        self._lost = ""
        self.block = 0
        """tokens of a block of the prefix cache"""
        self.max_tokens = 0
        """positions of one sequence"""

    # ------------------------------------------------------------ life

    def start(self, directory: Path, label: str, positions: int) -> None:
        """Start vLLM on these weights, known as `label`: seconds to minutes. ConfigError, EngineLost."""
        arguments = engine_arguments(self.settings, directory, self.build, positions)
        for name, value in engine_environment(self.settings, self.build).items():
            os.environ[name] = value
        self._thread.start()
        self.call(self._start(arguments, label), self.settings.start_limit_s, f"start on {directory}")
        event(log, "vllm_started", vllm=self.version, directory=str(directory), block=self.block)

    def close(self) -> None:
        """End vLLM's processes and the thread. Safe to call twice."""
        if not self._loop.is_closed() and self._thread.is_alive():
            try:
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_LIMIT_S)
            except Exception as error:  # noqa: BLE001 (vLLM's last words; its processes end with this one in any case)
                event(log, "vllm_close", level=logging.WARNING, reason=_words(error))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_LIMIT_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._engine = None

    def check(self) -> None:
        """EngineLost when vLLM is gone."""
        if self._lost:
            raise EngineLost(self._lost)

    # ------------------------------------------------------------ requests in flight

    @property
    def running(self) -> int:
        """Requests begun whose answers were not taken."""
        return self._running

    def begin(self, asks: Sequence[Ask]) -> None:
        """Hand requests over; their answers come through `take`."""
        self.check()
        self._running += len(asks)
        self._loop.call_soon_threadsafe(self._spawn, list(asks), self._salt)

    def take(self) -> list[Answer]:
        """Answers that have come since. Never waits."""
        self.check()
        taken: list[Answer] = []
        while True:
            try:
                taken.append(self._results.get_nowait())
            except Empty:
                self._running -= len(taken)
                return taken

    def stop_all(self) -> Future[None]:
        """End what runs; each comes back through `take` with the tokens it has. The future: all have."""
        self.check()
        return asyncio.run_coroutine_threadsafe(self._stop_all(), self._loop)

    def ask(self, token_ids: Sequence[int], arguments: Mapping[str, Any]) -> Answer:
        """One request, waited for."""
        request = Ask(key=-1, token_ids=token_ids, arguments=arguments)
        return self.call(self._answer(request, self._name(), self._salt), self.settings.load_limit_s, "answer")

    # ------------------------------------------------------------ weights

    def stage(self, paths: Sequence[Path], shapes: Mapping[str, Sequence[int]]) -> None:
        """Have every worker open and compare the files. Nothing is touched."""
        arguments = {"paths": [str(path) for path in paths], "shapes": {n: list(s) for n, s in shapes.items()}}
        self.call(self._in_workers("driftlog_stage", arguments), self.settings.load_limit_s, f"staging {paths[0]}")

    def clear(self) -> None:
        """Forget every cached key and value; nothing is scheduled until `serve`. Nothing may be running."""
        self.call(self._clear(), self.settings.load_limit_s, "clearing the caches")

    def swap(self, rotated: Sequence[str] = ()) -> None:
        """Replace the weights by the staged ones, in every worker."""
        self.call(self._in_workers("driftlog_swap", {"rotated": list(rotated)}), self.settings.load_limit_s, "the swap")

    def serve(self, label: str, salt: str) -> None:
        """Schedule again, under this label. Cached blocks of another salt are never found again."""
        self.call(self._serve(label), self.settings.load_limit_s, "going on after the swap")
        self._salt = salt

    def call(self, work: Coroutine[Any, Any, T], limit_s: float, what: str) -> T:
        """Run it on the loop and wait for it, at most limit_s. Whatever vLLM raises becomes EngineLost."""
        if self._lost or not self._thread.is_alive():
            work.close()
            raise EngineLost(self._lost or f"vllm is not running: {what} is impossible")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s)
        except TimeoutError as error:
            future.cancel()
            # Nobody knows what vLLM did or will still do: it is not used again.
            self._lost = f"vllm: {what} did not end within {limit_s:g} s; see its words in the log"
            raise EngineLost(self._lost) from error
        except Exception as error:  # vLLM raises of every kind; this is the boundary, and it raises again
            words = f"vllm: {what} failed: {_words(error)}"
            if self._engine is not None and self._engine.errored:
                self._lost = words
            raise EngineLost(words) from error

    # ------------------------------------------------------------ on the loop

    async def _start(self, arguments: dict[str, Any], label: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._engine = engine
        config = engine.vllm_config
        self.max_tokens = int(config.model_config.max_model_len)
        self.block = int(config.cache_config.block_size) if config.cache_config.enable_prefix_caching else 0
        await self._in_workers("driftlog_die_with", {"service_pid": os.getpid()})
        await engine.update_weight_version(label)

    async def _close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown(timeout=_CORE_CLOSE_S)
            # Its __del__ calls this again, when half of the interpreter is gone, and would say so on stderr.
            self._engine.shutdown = _nothing
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CORE_CLOSE_S)

    def _name(self) -> str:
        return f"d{next(self._names)}"

    def _spawn(self, asks: Sequence[Ask], salt: str) -> None:
        for ask in asks:
            name = self._name()
            task = self._loop.create_task(self._run(ask, name, salt))
            self._tasks[name] = task
            task.add_done_callback(lambda done, name=name: self._ended(name, done))  # type: ignore[misc]

    async def _run(self, ask: Ask, name: str, salt: str) -> None:
        self._results.put(await self._answer(ask, name, salt))
        self._ring()

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            self._lost = self._lost or f"vllm lost a request: {_words(error)}; start the service again"
            self._ring()

    async def _answer(self, ask: Ask, name: str, salt: str) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(**ask.arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"prompt_token_ids": list(ask.token_ids), "cache_salt": salt}
        final: Any = None
        async for output in self._engine.generate(prompt, parameters, name):
            final = output
        return _answer(ask.key, ask.token_ids, final)

    async def _stop_all(self) -> None:
        while self._tasks:
            await self._engine.abort(list(self._tasks))
            await asyncio.wait(list(self._tasks.values()), timeout=_ABORT_AGAIN_S)

    async def _in_workers(self, method: str, arguments: dict[str, Any]) -> None:
        await self._engine.collective_rpc(method, kwargs=arguments)

    async def _clear(self) -> None:
        await self._engine.pause_generation(mode="abort", clear_cache=True)

    async def _serve(self, label: str) -> None:
        await self._engine.update_weight_version(label)
        await self._engine.resume_generation()


def _answer(key: int, token_ids: Sequence[int], final: Any) -> Answer:
    completion = final.outputs[0]
    scored: list[float] = []
    if final.prompt_logprobs is not None:
        # Entry 0 is the first token, which nothing comes before.
        scored = [final.prompt_logprobs[place][token_ids[place]].logprob for place in range(1, len(token_ids))]
    logprobs = completion.logprobs
    return Answer(
        key=key,
        token_ids=[int(token) for token in completion.token_ids],
        logprobs=[] if logprobs is None else [float(logprobs.logprobs[start]) for start in logprobs.start_indices],
        finish_reason=str(completion.finish_reason),
        spans=[(span.version, span.start, span.end) for span in completion.weight_versions or []],
        prompt_logprobs=scored,
    )


def _nothing(timeout: float | None = None) -> None:
    pass


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"
