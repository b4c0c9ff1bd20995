"""A checkpoint whose last files are made while the first ones are on their way to the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra import checkpoint_files
from infra.checkpoint_store import FsspecCheckpointStore
from schemas.checkpoint import PROBE_NAME, WEIGHTS_NAME
from schemas.errors import CheckpointRefused
from tests.contract.test_checkpoint_store_contract import manifest_for

LIMIT_S = 30.0


@pytest.fixture
def store(tmp_path: Path) -> FsspecCheckpointStore:
    return FsspecCheckpointStore(str(tmp_path / "store"), "demo")


def test_the_last_files_are_made_while_the_first_are_synced_and_every_one_is(
    store: FsspecCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    finishing = threading.Event()
    synced: list[str] = []
    sync = checkpoint_files.fsync_path

    def waiting(path: Path) -> None:
        if path.name == WEIGHTS_NAME:
            assert finishing.wait(LIMIT_S), "finish was not called while the weights were synced"
        sync(path)
        synced.append(path.name)

    monkeypatch.setattr(checkpoint_files, "fsync_path", waiting)

    def write(directory: Path) -> Callable[[], None]:
        (directory / WEIGHTS_NAME).write_bytes(b"weights")

        def finish() -> None:
            (directory / PROBE_NAME).write_bytes(b"probe")
            finishing.set()

        return finish

    saved = store.save("a1", write, manifest_for("a1"))

    place, manifest = store.fetch(saved.manifest_uri, saved.manifest_sha256)
    assert [entry.name for entry in manifest.files] == sorted((WEIGHTS_NAME, PROBE_NAME))
    assert (place / PROBE_NAME).read_bytes() == b"probe"
    assert {WEIGHTS_NAME, PROBE_NAME} <= set(synced)


def _again(path: Path) -> None:
    path.write_bytes(b"other")


@pytest.mark.parametrize("spoil", [_again, Path.unlink])
def test_a_file_that_was_finished_is_not_touched_again(
    store: FsspecCheckpointStore, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """It may be on the disk in its first form, or hashed in it."""

    def write(directory: Path) -> Callable[[], None]:
        (directory / WEIGHTS_NAME).write_bytes(b"weights")
        return lambda: spoil(directory / WEIGHTS_NAME)

    with pytest.raises(CheckpointRefused, match="written again after they were finished"):
        store.save("a1", write, manifest_for("a1"))
    assert store.attempts() == [] and list((tmp_path / "store" / "demo").iterdir()) == []


def test_last_files_that_cannot_be_made_leave_nothing_behind(store: FsspecCheckpointStore, tmp_path: Path) -> None:
    def write(directory: Path) -> Callable[[], None]:
        (directory / WEIGHTS_NAME).write_bytes(b"weights")
        return (directory / "gone" / PROBE_NAME).touch

    with pytest.raises(FileNotFoundError):
        store.save("a1", write, manifest_for("a1"))
    assert store.attempts() == [] and list((tmp_path / "store" / "demo").iterdir()) == []
