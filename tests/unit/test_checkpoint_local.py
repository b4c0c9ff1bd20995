"""What only a file system can do to a checkpoint: crashes, links, full disks, late directories, races."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import checkpoint_files as files
from infra.checkpoint_files import StoreLimits
from infra.checkpoint_store import FsspecCheckpointStore
from schemas.checkpoint import MANIFEST_NAME, PROBE_NAME, WEIGHTS_NAME
from schemas.errors import CheckpointInvalid, CheckpointMissing, CheckpointRefused, ConfigError, IllegalState, StoreFull
from tests.contract.test_checkpoint_store_contract import MUCH_LATER_US, WEIGHTS, manifest_for, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> FsspecCheckpointStore:
    return FsspecCheckpointStore(str(root), "demo", limits=StoreLimits(reserve_bytes=0))


def test_the_manifest_names_the_probe_by_the_bytes_that_were_written(store: FsspecCheckpointStore) -> None:
    def write(directory: Path) -> None:
        (directory / PROBE_NAME).write_bytes(b"probe")

    bare, probed = (store.save(name, to, manifest_for(name)) for name, to in (("a1", write_checkpoint), ("a2", write)))
    found = [store.fetch(saved.manifest_uri, saved.manifest_sha256)[1].probe_sha256 for saved in (bare, probed)]
    assert found == ["", hashlib.sha256(b"probe").hexdigest()]


def test_a_trainer_killed_half_way_leaves_only_a_hidden_leftover(root: Path, store: FsspecCheckpointStore) -> None:
    store.save("a1", write_checkpoint, manifest_for("a1"))
    script = f"""
import os
from infra.checkpoint_store import FsspecCheckpointStore
from tests.contract.test_checkpoint_store_contract import WEIGHTS, manifest_for
def die(directory):
    (directory / "model.safetensors").write_bytes(WEIGHTS[:5000])
    os._exit(9)
FsspecCheckpointStore({str(root)!r}, "demo").save("a2", die, manifest_for("a2"))
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=False, capture_output=True)
    assert result.returncode == 9, result.stderr

    leftovers = [path.name for path in (root / "demo").iterdir() if path.name != "a1"]
    assert len(leftovers) == 1
    assert leftovers[0].startswith(".tmp-a2-")
    assert store.attempts() == ["a1"]
    with pytest.raises(CheckpointMissing):
        store.fetch("demo/a2/manifest.json", "00")

    assert store.collect_garbage(["demo/a1/manifest.json"], grace_s=60, now_us=1_000_000, at_most=9) == []
    assert store.collect_garbage(["demo/a1/manifest.json"], grace_s=60, now_us=MUCH_LATER_US, at_most=9) == leftovers
    assert [path.name for path in (root / "demo").iterdir()] == ["a1"]


def test_a_crash_between_weights_and_rename_shows_nothing(
    root: Path, store: FsspecCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def crash(source: Path, target: Path) -> None:
        # The manifest is already in the temporary directory; under the final name there is still nothing.
        seen.append(sorted(path.name for path in Path(source).iterdir()))
        assert store.attempts() == []
        raise OSError(errno.EIO, "crash")

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(OSError, match="crash"):
        store.save("a1", write_checkpoint, manifest_for("a1"))

    assert seen == [["chat_template.jinja", "config.json", MANIFEST_NAME, WEIGHTS_NAME]]
    assert list((root / "demo").iterdir()) == []


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_after(
    root: Path, store: FsspecCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    lock = threading.Lock()
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        with lock:
            steps.append("temp dir" if name.startswith(".tmp-") else name)
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        steps.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    store.save("a1", write_checkpoint, manifest_for("a1"))

    assert sorted(steps[:3]) == ["chat_template.jinja", "config.json", WEIGHTS_NAME]
    assert steps[3:] == [MANIFEST_NAME, "temp dir", "rename", "demo", "root"]


def test_a_reader_sees_nothing_or_the_whole_never_a_part(
    root: Path, store: FsspecCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shas: dict[str, str] = {}
    verified: list[str] = []
    errors: list[BaseException | None] = []
    done = threading.Event()

    def read_all_the_time() -> None:
        last_pass = False
        while not last_pass:
            last_pass = done.is_set()
            for attempt_id in store.attempts():
                # Listed means complete: every file must be there, also when the save has not returned yet.
                if attempt_id in shas:
                    verified.append(store.fetch(f"demo/{attempt_id}/manifest.json", shas[attempt_id])[0].name)
                else:
                    assert len(list((root / "demo" / attempt_id).iterdir())) == 4

    reader = threading.Thread(target=read_all_the_time)
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    reader.start()
    try:
        for index in range(40):
            attempt_id = f"a{index}"
            shas[attempt_id] = store.save(attempt_id, write_checkpoint, manifest_for(attempt_id)).manifest_sha256
    finally:
        done.set()
        reader.join(timeout=60)

    assert errors == []
    assert set(verified) == set(shas)


def test_published_files_are_read_only(root: Path, store: FsspecCheckpointStore) -> None:
    store.save("a1", write_checkpoint, manifest_for("a1"))

    assert [path.stat().st_mode & 0o222 for path in (root / "demo/a1").iterdir()] == [0, 0, 0, 0]


def test_two_saves_of_one_attempt_at_the_same_time_publish_one(store: FsspecCheckpointStore) -> None:
    first = []

    def other_save_wins(directory: Path) -> None:
        write_checkpoint(directory)
        first.append(store.save("a1", write_checkpoint, manifest_for("a1")))

    with pytest.raises(IllegalState, match="exists already"):
        store.save("a1", other_save_wins, manifest_for("a1"))

    assert store.fetch(first[0].manifest_uri, first[0].manifest_sha256)[1].attempt_id == "a1"


@pytest.mark.parametrize("what", ["file", "attempt", "run"])
def test_a_symbolic_link_below_the_root_is_not_followed(root: Path, store: FsspecCheckpointStore, what: str) -> None:
    saved = store.save("a1", write_checkpoint, manifest_for("a1"))
    linked = {"file": root / "demo/a1" / WEIGHTS_NAME, "attempt": root / "demo/a1", "run": root / "demo"}[what]
    outside = root.parent / "outside"
    linked.rename(outside)
    linked.symlink_to(outside)

    with pytest.raises(CheckpointRefused, match="symbolic link"):
        store.fetch(saved.manifest_uri, saved.manifest_sha256)


def test_a_root_that_is_a_link_itself_is_the_users_choice(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    store = FsspecCheckpointStore(str(tmp_path / "root"), "demo")

    saved = store.save("a1", write_checkpoint, manifest_for("a1"))

    assert store.fetch(saved.manifest_uri, saved.manifest_sha256)[0] == tmp_path / "disk/demo/a1"


def test_a_linked_attempt_is_not_deleted_through(root: Path, store: FsspecCheckpointStore) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("x")
    (root / "demo").mkdir(parents=True)
    (root / "demo/a1").symlink_to(outside)

    with pytest.raises(CheckpointRefused, match="by hand"):
        store.delete("demo/a1/manifest.json")
    store.collect_garbage(["demo/a9/manifest.json"], grace_s=0, now_us=MUCH_LATER_US, at_most=9)

    assert (outside / "precious.txt").read_text() == "x"


def test_a_pipe_in_place_of_a_file_does_not_hang_the_reader(root: Path, store: FsspecCheckpointStore) -> None:
    saved = store.save("a1", write_checkpoint, manifest_for("a1"))
    (root / "demo/a1/config.json").unlink()
    os.mkfifo(root / "demo/a1/config.json")

    with pytest.raises(CheckpointRefused, match="not a regular file"):
        store.fetch(saved.manifest_uri, saved.manifest_sha256)


def test_a_file_that_the_manifest_does_not_list_is_found(root: Path, store: FsspecCheckpointStore) -> None:
    saved = store.save("a1", write_checkpoint, manifest_for("a1"))
    (root / "demo/a1/modeling_evil.py").write_text("boom")

    with pytest.raises(CheckpointInvalid, match=r"modeling_evil\.py"):
        store.fetch(saved.manifest_uri, saved.manifest_sha256)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ESTALE, CheckpointMissing),
        (errno.ENOENT, CheckpointMissing),
        (errno.ETIMEDOUT, CheckpointMissing),
        (errno.ELOOP, CheckpointRefused),
        (errno.EACCES, CheckpointInvalid),
    ],
)
def test_an_error_of_the_file_system_says_whether_to_try_again(number: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="demo/a1"), files.reading("demo/a1"):
        raise OSError(number, os.strerror(number))


def test_a_directory_that_shows_up_late_is_missing_first_and_good_then(
    root: Path, store: FsspecCheckpointStore
) -> None:
    saved = store.save("a1", write_checkpoint, manifest_for("a1"))
    (root / "demo/a1").rename(root / "not-visible-yet")
    with pytest.raises(CheckpointMissing) as caught:
        store.fetch(saved.manifest_uri, saved.manifest_sha256)
    assert caught.value.retriable

    (root / "not-visible-yet").rename(root / "demo/a1")

    assert store.fetch(saved.manifest_uri, saved.manifest_sha256)[1].attempt_id == "a1"


def test_a_save_that_cannot_fit_is_refused_before_it_writes(root: Path, store: FsspecCheckpointStore) -> None:
    store.save("a1", write_checkpoint, manifest_for("a1"))
    cautious = FsspecCheckpointStore(str(root), "demo", limits=StoreLimits(reserve_bytes=1 << 60))

    def never(directory: Path) -> None:
        raise AssertionError("must not be called")

    with pytest.raises(
        StoreFull, match=r"demo/a2: needs at least 1,152,921,504,606,[\d,]+ bytes, [\d,]+ bytes are free"
    ):
        cautious.save("a2", never, manifest_for("a2"))

    assert [path.name for path in (root / "demo").iterdir()] == ["a1"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where this machine lets us have one."""
    path = tmp_path / "tiny"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs more rights than this process has")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=30)


def test_a_really_full_disk_keeps_the_first_version_and_nothing_of_the_second(tiny_disk: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    store = FsspecCheckpointStore(str(tiny_disk), "demo", limits=StoreLimits(reserve_bytes=0))

    def write(directory: Path) -> None:
        save_file({"w": np.zeros(40_000, dtype=np.float32)}, directory / WEIGHTS_NAME)

    saved = store.save("a1", write, manifest_for("a1"))

    with pytest.raises(StoreFull, match="needs at least 160,"):
        store.save("a2", write, manifest_for("a2"))
    # A store that knows no size yet gets as far as the write itself.
    store.delete(saved.manifest_uri)
    fresh = FsspecCheckpointStore(str(tiny_disk), "demo", limits=StoreLimits(reserve_bytes=0))
    with pytest.raises(StoreFull):
        fresh.save("a3", lambda d: (d / WEIGHTS_NAME).write_bytes(b"x" * 400_000) and None, manifest_for("a3"))

    assert list((tiny_disk / "demo").iterdir()) == []
    assert store.save("a4", write, manifest_for("a4")).bytes > 160_000


def test_the_first_version_stays_when_the_second_is_killed_or_invalid(store: FsspecCheckpointStore) -> None:
    saved = store.save("a1", write_checkpoint, manifest_for("a1"))

    def killed(directory: Path) -> None:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        store.save("a2", killed, manifest_for("a2"))

    assert store.fetch(saved.manifest_uri, saved.manifest_sha256)[0].name == "a1"


@pytest.mark.parametrize("root", ["https://example.org/x", "hf://org/model", "simplecache::s3://bucket"])
def test_a_root_that_could_fetch_from_anywhere_is_refused(root: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.root"):
        FsspecCheckpointStore(root, "demo", cache_dir=tmp_path)


def test_a_remote_root_needs_a_cache_and_a_known_protocol(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_dir"):
        FsspecCheckpointStore("memory://x", "demo")
    with pytest.raises(ConfigError, match="nonsense"):
        FsspecCheckpointStore("nonsense://x", "demo", cache_dir=tmp_path)


def test_a_remote_cache_heals_itself_and_stays_bounded(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    store = FsspecCheckpointStore(
        f"memory://cache-test-{tmp_path.name}", "demo", cache_dir=cache, limits=StoreLimits(cache_entries=2)
    )
    saved = [store.save(f"a{index}", write_checkpoint, manifest_for(f"a{index}")) for index in range(4)]

    for one in saved:
        store.fetch(one.manifest_uri, one.manifest_sha256)
    assert len(list((cache / "demo").iterdir())) == 2

    directory, _ = store.fetch(saved[3].manifest_uri, saved[3].manifest_sha256)
    (directory / WEIGHTS_NAME).write_bytes(b"rotten")
    directory, _ = store.fetch(saved[3].manifest_uri, saved[3].manifest_sha256)
    assert (directory / WEIGHTS_NAME).read_bytes() == WEIGHTS


def test_a_remote_store_that_does_not_answer_is_worth_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    store = FsspecCheckpointStore("memory://down", "demo", cache_dir=tmp_path)

    class EndpointError(Exception):
        """As client libraries have: no OSError."""

    def down(*args: object, **kwargs: object) -> None:
        raise EndpointError("connection refused")

    monkeypatch.setattr(fsspec.filesystem("memory"), "open", down)
    with pytest.raises(CheckpointMissing, match="does not answer: EndpointError: connection refused"):
        store.fetch("demo/a1/manifest.json", "00")


def test_an_upload_that_breaks_half_way_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    store = FsspecCheckpointStore("memory://half", "demo", cache_dir=tmp_path)
    put_file = memory.put_file

    def breaks_at_weights(source: str, target: str) -> None:
        if target.endswith(WEIGHTS_NAME):
            raise OSError(errno.EPIPE, "broken pipe")
        put_file(source, target)

    monkeypatch.setattr(memory, "put_file", breaks_at_weights)
    with pytest.raises(CheckpointInvalid, match="broken pipe"):
        store.save("a1", write_checkpoint, manifest_for("a1"))

    assert memory.find("/half") == []
    assert list(tmp_path.iterdir()) == []


def test_a_save_tells_where_its_seconds_went(root: Path) -> None:
    ticks = iter(range(1000))
    timed = FsspecCheckpointStore(
        str(root), "demo", limits=StoreLimits(reserve_bytes=0), fsync=False, monotonic_s=lambda: float(next(ticks))
    )

    saved = timed.save("a1", write_checkpoint, manifest_for("a1"))

    assert saved.phase_s == {"write": 1.0, "hash": 1.0, "publish": 1.0}


def test_a_save_that_is_synced_tells_how_long_each_file_took_together(root: Path, store: FsspecCheckpointStore) -> None:
    saved = store.save("a1", write_checkpoint, manifest_for("a1"))

    assert set(saved.phase_s) == {"write", "hash", "fsync", "publish"}
    assert all(seconds >= 0 for seconds in saved.phase_s.values())
