"""What a simulated process sees of the world: its own clocks, an executor that takes virtual time, and a store
whose files come late or torn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from infra.checkpoint_files import parse_manifest_uri
from infra.checkpoint_store import FsspecCheckpointStore
from infra.ports import SavedCheckpoint, Write
from schemas.checkpoint import WEIGHTS_NAME, Manifest
from tests.fakes.memory_log import Crash, Hook
from tests.fakes.virtual_clock import VirtualClock

Trouble = Literal["late", "torn"]


class SkewedClock:
    """A process's view of time: the wall clock is off and may jump, the monotonic one begins anywhere."""

    def __init__(self, base: VirtualClock, *, off_s: float, jump_at_s: float, jump_s: float, origin_s: float) -> None:
        self._base = base
        self._off_us = round(off_s * 1e6)
        self._jump_at_s = jump_at_s
        self._jump_us = round(jump_s * 1e6)
        self._origin_s = origin_s

    def now_us(self) -> int:
        """Wall clock in microseconds."""
        jumped = self._base.monotonic_s() >= self._jump_at_s
        return self._base.now_us() + self._off_us + (self._jump_us if jumped else 0)

    def monotonic_s(self) -> float:
        """Seconds since this process's own beginning of time."""
        return self._base.monotonic_s() + self._origin_s


class LateFuture(Future[Any]):
    """Done when its time has come; the work happens then, inside `done`."""

    def __init__(self, due_s: float, clock: VirtualClock, work: Callable[[], Any]) -> None:
        super().__init__()
        self._due_s = due_s
        self._virtual = clock
        self._work: Callable[[], Any] | None = work

    def done(self) -> bool:
        if self._work is not None and self._virtual.monotonic_s() >= self._due_s:
            work, self._work = self._work, None
            try:
                self.set_result(work())
            except Exception as error:  # noqa: BLE001 - as a pool does: the caller sees it at result()
                self.set_exception(error)
        return super().done()


class LateExecutor(Executor):
    """A pool of one thread whose calls take virtual time. While the engine is among them it must not sample."""

    def __init__(self, clock: VirtualClock, delay_s: Callable[[], float], engine: Any) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self._engine = engine

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start it; it ends later."""
        uses_engine = any(arg is self._engine for arg in args)
        self._engine.in_background |= uses_engine

        def work() -> Any:
            if uses_engine:
                self._engine.in_background = False
            return fn(*args, **kwargs)

        future = LateFuture(self._clock.monotonic_s() + self._delay_s(), self._clock, work)
        future.done()
        return future


class FaultyStore:
    """A process's view of the store: places to die inside each call, and files that are not there yet or torn."""

    def __init__(
        self,
        store: FsspecCheckpointStore,
        root: Path,
        hook: Hook,
        trouble: Callable[[str], Trouble | None],
        clock: VirtualClock,
    ) -> None:
        self._store = store
        self._root = root
        self._hook = hook
        self._trouble = trouble
        self._clock = clock

    def save(self, attempt_id: str, write: Write, manifest: Manifest) -> SavedCheckpoint:
        """As the store's; a death inside leaves the files behind, as a real one does."""
        self._hook("store.save", "before")

        def dying(directory: Path) -> Callable[[], None]:
            with mourned(directory):
                self._hook("store.write", "before")
                finish = write(directory)

            def finish_dying() -> None:
                with mourned(directory):
                    if finish is not None:
                        finish()
                    self._hook("store.write", "after")

            return finish_dying

        @contextmanager
        def mourned(directory: Path) -> Iterator[None]:
            try:
                yield
            except Crash:
                # The store's own cleaning up is code that a dead process does not run.
                left = directory.with_name(f".tmp-{attempt_id}-dead")
                left.mkdir()
                for path in directory.iterdir():
                    (left / path.name).write_bytes(path.read_bytes()[:7])
                self._stamp(left)
                raise

        saved = self._store.save(attempt_id, dying, manifest)
        self._stamp(self._root / parse_manifest_uri(saved.manifest_uri).directory)
        self._hook("store.save", "after")
        return saved

    def fetch(self, manifest_uri: str, manifest_sha256: str) -> tuple[Path, Manifest]:
        """As the store's, through a network file system that has a bad day."""
        self._hook("store.fetch", "before")
        directory = self._root / parse_manifest_uri(manifest_uri).directory
        trouble = self._trouble(manifest_uri) if directory.is_dir() else None
        with _hidden(directory) if trouble == "late" else _torn(directory) if trouble == "torn" else _fine():
            fetched = self._store.fetch(manifest_uri, manifest_sha256)
            if trouble == "torn":  # nobody noticed: what was verified is not what is there
                fetched = (_kept(directory), fetched[1])
        self._hook("store.fetch", "after")
        return fetched

    def delete(self, manifest_uri: str) -> None:
        """As the store's."""
        self._hook("store.delete", "before")
        self._store.delete(manifest_uri)
        self._hook("store.delete", "after")

    def collect_garbage(
        self, keep_uris: Collection[str], *, grace_s: float, now_us: int, at_most: int
    ) -> Sequence[str]:
        """As the store's."""
        self._hook("store.collect", "before")
        removed = self._store.collect_garbage(keep_uris, grace_s=grace_s, now_us=now_us, at_most=at_most)
        self._hook("store.collect", "after")
        return removed

    def attempts(self) -> list[str]:
        """As the store's."""
        return list(self._store.attempts())

    def look_at(self, attempt_id: str) -> tuple[str, Manifest]:
        """As the store's."""
        return self._store.look_at(attempt_id)

    def _stamp(self, directory: Path) -> None:
        """Written now, by the clock of this world. A planted bug may have left nothing there."""
        if not directory.is_dir():
            return
        now_ns = self._clock.now_us() * 1000
        for path in (*directory.iterdir(), directory):
            os.utime(path, ns=(now_ns, now_ns))


def _kept(directory: Path) -> Path:
    """A copy of the directory as it looks now."""
    copy = directory.with_name(f".torn-{directory.name}")
    shutil.rmtree(copy, ignore_errors=True)
    return Path(shutil.copytree(directory, copy))


@contextmanager
def _fine() -> Iterator[None]:
    yield


@contextmanager
def _hidden(directory: Path) -> Iterator[None]:
    """The directory is not visible from here yet."""
    away = directory.with_name(f".late-{directory.name}")
    os.rename(directory, away)
    try:
        yield
    finally:
        os.rename(away, directory)


@contextmanager
def _torn(directory: Path) -> Iterator[None]:
    """The weights are only half there from here."""
    path = directory / WEIGHTS_NAME
    whole, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o644)
    path.write_bytes(whole[: len(whole) // 2])
    try:
        yield
    finally:
        path.write_bytes(whole)
        path.chmod(mode)
