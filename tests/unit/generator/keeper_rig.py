"""A worker's weights keeper with everything around it in the test's hands."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from infra.ports import Placed
from producers.weights import WeightsKeeper, WeightsSettings
from schemas.errors import DeliveryFailed
from schemas.policy_events import AnyPolicyEvent
from tests.fakes.inline_executor import InlineExecutor
from tests.fakes.log_script import G0, PolicyScript, running
from tests.fakes.tiny_policy import TinyEngine, TinyLearner, next_weights
from tests.fakes.virtual_clock import VirtualClock


class Sent:
    """The Delivery port, already decided."""

    def __init__(self, offset: int | None) -> None:
        self._offset = offset

    def done(self) -> bool:
        return True

    def result(self, timeout_s: float) -> Placed:
        if self._offset is None:
            raise DeliveryFailed("planted")
        return Placed(partition=0, offset=self._offset)


class Shelf:
    """A store whose answers the test decides: `errors` are raised first, one a fetch."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.errors: list[Exception] = []
        self.always: Exception | None = None
        self.fetched: list[str] = []

    def put(self, version: int, weights: str) -> None:
        learner = TinyLearner()
        learner.weights = weights
        directory = self._root / f"a{version}"
        directory.mkdir()
        learner.save(directory)

    def fetch(self, manifest_uri: str, manifest_sha256: str) -> tuple[Path, Any]:
        self.fetched.append(manifest_uri)
        if self.errors:
            raise self.errors.pop(0)
        if self.always is not None:
            raise self.always
        return self._root / manifest_uri.split("/")[1], None


class SlowExecutor(Executor):
    """Work waits until the test lets it happen."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def work(self) -> None:
        """Do everything that waits."""
        waiting, self.waiting = self.waiting, []
        for future, call in waiting:
            inner = InlineExecutor().submit(call)
            if (error := inner.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(inner.result())


def weights_of(version: int) -> str:
    """Weights of a version, all different."""
    return next_weights("w", str(version))


LIMITS = WeightsSettings(
    run="demo", drain_timeout_s=2.0, fetch_timeout_s=60.0, load_tries=2, retry_wait_s=0.5, probe_tolerance=1e-4
)


class KeeperRig:
    """g0 is admitted and holds version 0 proven."""

    def __init__(
        self,
        root: Path,
        executor: Executor | None = None,
        *,
        prefix_cache: bool = False,
        limits: WeightsSettings = LIMITS,
    ) -> None:
        self.clock = VirtualClock()
        self.script: PolicyScript = PolicyScript()
        self.engine = TinyEngine(self.clock, prefix_cache=prefix_cache)
        self.shelf = Shelf(root)
        self.sent: list[AnyPolicyEvent] = []
        self.lose_sends = 0
        for version in range(4):
            self.shelf.put(version, weights_of(version))
        self.keeper = WeightsKeeper(
            limits, engine=self.engine, store=self.shelf, executor=executor or InlineExecutor(),  # type: ignore[arg-type]
            clock=self.clock, send=self._send,
        )  # fmt: skip

    def _send(self, event: AnyPolicyEvent) -> Sent:
        self.sent.append(event)
        if self.lose_sends:
            self.lose_sends -= 1
            return Sent(None)
        self.script.tell(event)
        return Sent(self.script.last)

    def step(self, times: int = 8) -> None:
        for _ in range(times):
            self.keeper.step(self.script.fold, G0)

    def holding_0(self) -> KeeperRig:
        self.script.started()
        self.script.joined(G0)
        self.script.published(0)
        self.script.switched("s0", 0, [G0])
        self.step()
        self.script.activated("s0", 0, [self.script.last])
        assert self.keeper.held == 0
        self.sent.clear()
        return self

    def joining_late(self) -> KeeperRig:
        """Version 0 is live with g1; g0 has just joined and holds nothing."""
        script, _ = running(("g1", "i1"))
        script.joined(G0)
        self.script = script
        return self

    def switch_to(self, version: int) -> None:
        self.script.published(version)
        self.script.switched(f"s{version}", version, [G0])
