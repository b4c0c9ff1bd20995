"""What every checkpoint store promises, held against a local directory and an object store."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from infra.checkpoint_files import StoreLimits
from infra.checkpoint_store import FsspecCheckpointStore
from schemas.checkpoint import MANIFEST_NAME, WEIGHTS_NAME, Manifest
from schemas.errors import (
    CheckpointInvalid,
    CheckpointMissing,
    CheckpointRefused,
    IllegalState,
    StoreFull,
)

HOUR_S = 3_600.0
MUCH_LATER_US = 4_000_000_000_000_000
WEIGHTS = bytes(range(256)) * 40
CONFIG = b'{"hidden_size": 64}\n'


def manifest_for(attempt_id: str, run: str = "demo") -> Manifest:
    return Manifest(
        run=run, attempt_id=attempt_id, parent=None, dtype={"all": "float32"}, fingerprint={},
        optimizer_step=0, has_state=True, library_versions={}, threads=1, device_type="cpu", logprob_chunk=0,
        code_revision="test", config_digest="00",
    )  # fmt: skip


def write_checkpoint(directory: Path) -> None:
    (directory / WEIGHTS_NAME).write_bytes(WEIGHTS)
    (directory / "config.json").write_bytes(CONFIG)
    (directory / "chat_template.jinja").write_text("{{ messages }}")


@dataclass
class Place:
    """One backend: a store on it, and a back door to what lies there."""

    store: FsspecCheckpointStore
    open_again: Callable[[], FsspecCheckpointStore]
    read: Callable[[str], bytes]
    overwrite: Callable[[str, bytes], None]
    remove: Callable[[str], None]
    names: Callable[[], list[str]]


def _local(tmp_path: Path, limits: StoreLimits) -> Place:
    root = tmp_path / "root"

    def open_store() -> FsspecCheckpointStore:
        return FsspecCheckpointStore(str(root), "demo", limits=limits, fsync=False)

    def overwrite(name: str, data: bytes) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if (root / name).exists():
            (root / name).chmod(0o644)
        (root / name).write_bytes(data)

    return Place(
        store=open_store(),
        open_again=open_store,
        read=lambda name: (root / name).read_bytes(),
        overwrite=overwrite,
        remove=lambda name: (root / name).unlink(),
        names=lambda: sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()),
    )


def _memory(tmp_path: Path, limits: StoreLimits) -> Place:
    fs, base = fsspec.filesystem("memory"), f"/store-{uuid.uuid4().hex}"
    caches = iter(range(100))

    def open_store() -> FsspecCheckpointStore:
        # A cache of its own, as another process has.
        cache = tmp_path / f"cache{next(caches)}"
        return FsspecCheckpointStore(f"memory:/{base}", "demo", cache_dir=cache, limits=limits, fsync=False)

    return Place(
        store=open_store(),
        open_again=open_store,
        read=lambda name: fs.cat_file(f"{base}/{name}"),
        overwrite=lambda name, data: fs.pipe_file(f"{base}/{name}", data),
        remove=lambda name: fs.rm_file(f"{base}/{name}"),
        names=lambda: sorted(path.removeprefix(f"{base}/") for path in fs.find(base)) if fs.exists(base) else [],
    )


BACKENDS = {"local": _local, "memory": _memory}


@pytest.fixture(params=sorted(BACKENDS))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return BACKENDS[request.param](tmp_path, StoreLimits(max_bytes=1 << 20, max_files=8, reserve_bytes=0))


def test_what_was_saved_is_fetched_byte_for_byte(place: Place) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))

    directory, manifest = place.open_again().fetch(saved.manifest_uri, saved.manifest_sha256)

    assert (directory / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert [entry.name for entry in manifest.files] == ["chat_template.jinja", "config.json", WEIGHTS_NAME]
    assert manifest.file(WEIGHTS_NAME).sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest() == saved.manifest_sha256
    assert saved.manifest_uri == "demo/a1/manifest.json"
    assert saved.bytes == sum(path.stat().st_size for path in directory.iterdir())


def test_a_failed_write_leaves_nothing_behind(place: Place) -> None:
    def half_then_crash(directory: Path) -> None:
        (directory / WEIGHTS_NAME).write_bytes(WEIGHTS[:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.store.save("a1", half_then_crash, manifest_for("a1"))

    assert place.names() == []
    assert place.store.attempts() == []


def test_a_directory_without_manifest_is_not_there(place: Place) -> None:
    place.overwrite(f"demo/a1/{WEIGHTS_NAME}", WEIGHTS)

    assert place.store.attempts() == []
    with pytest.raises(CheckpointMissing, match="demo/a1/manifest.json"):
        place.store.fetch("demo/a1/manifest.json", "00")


def test_a_look_says_where_a_directory_lies_and_reads_its_manifest_and_nothing_else(place: Place) -> None:
    place.store.save("a1", write_checkpoint, manifest_for("a1"))
    place.overwrite(f"demo/a1/{WEIGHTS_NAME}", b"torn")

    where, manifest = place.open_again().look_at("a1")

    assert where.endswith("/demo/a1")
    assert (manifest.attempt_id, len(manifest.files)) == ("a1", 3)
    with pytest.raises(CheckpointMissing, match="demo/a2/manifest.json"):
        place.store.look_at("a2")
    with pytest.raises(ValueError, match="attempt id"):
        place.store.look_at("../a1")


def test_a_second_save_of_the_same_attempt_is_refused_and_changes_nothing(place: Place) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))

    with pytest.raises(IllegalState, match="demo/a1 exists already"):
        place.store.save("a1", lambda directory: None, manifest_for("a1"))

    directory, _ = place.open_again().fetch(saved.manifest_uri, saved.manifest_sha256)
    assert (directory / WEIGHTS_NAME).read_bytes() == WEIGHTS


def test_one_flipped_bit_is_found_and_the_file_is_named(place: Place) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    damaged = bytearray(WEIGHTS)
    damaged[5_000] ^= 1
    place.overwrite(f"demo/a1/{WEIGHTS_NAME}", bytes(damaged))

    with pytest.raises(CheckpointInvalid, match=f"demo/a1/{WEIGHTS_NAME} has sha256"):
        place.open_again().fetch(saved.manifest_uri, saved.manifest_sha256)


@pytest.mark.parametrize("data", [WEIGHTS[:-1], WEIGHTS + b"x", b""])
def test_a_file_of_another_length_is_found_by_its_size(place: Place, data: bytes) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    place.overwrite(f"demo/a1/{WEIGHTS_NAME}", data)

    with pytest.raises(CheckpointInvalid, match=f"{WEIGHTS_NAME} has .* bytes, its manifest says"):
        place.open_again().fetch(saved.manifest_uri, saved.manifest_sha256)


def test_a_missing_file_is_missing_and_named(place: Place) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    place.remove("demo/a1/config.json")

    with pytest.raises(CheckpointMissing, match="demo/a1/config.json"):
        place.open_again().fetch(saved.manifest_uri, saved.manifest_sha256)


def test_a_manifest_of_another_attempt_is_found(place: Place) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    other = place.store.save("a2", write_checkpoint, manifest_for("a2"))
    place.overwrite("demo/a1/manifest.json", place.read("demo/a2/manifest.json"))

    with pytest.raises(CheckpointInvalid, match="the event says"):
        place.open_again().fetch(saved.manifest_uri, saved.manifest_sha256)
    with pytest.raises(CheckpointInvalid, match="mixed up"):
        place.open_again().fetch(saved.manifest_uri, other.manifest_sha256)


def test_new_weights_with_the_old_manifest_are_invalid_not_missing(place: Place) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    place.overwrite(f"demo/a1/{WEIGHTS_NAME}", bytes(reversed(WEIGHTS)))

    with pytest.raises(CheckpointInvalid):
        place.open_again().fetch(saved.manifest_uri, saved.manifest_sha256)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "manifest.json",
        "demo/manifest.json",
        "demo/a1",
        "demo/a1/",
        "demo/a1/model.safetensors",
        "demo/a1/x/manifest.json",
        "/demo/a1/manifest.json",
        "//host/demo/a1/manifest.json",
        "../demo/a1/manifest.json",
        "demo/../manifest.json",
        "demo/./manifest.json",
        "../../manifest.json",
        "demo/%2e%2e/manifest.json",
        "demo/a1%00/manifest.json",
        "demo/a1\x00/manifest.json",
        "demo/a1\n/manifest.json",
        "demo/a1/manifest.json\n",
        "demo\\a1\\manifest.json",
        "demo/.tmp-a1/manifest.json",
        "file:///demo/a1/manifest.json",
        "s3://demo/a1/manifest.json",
        "memory://a1/manifest.json",
        "Demo/a1/manifest.json",
        "demo/" + "a" * 129 + "/manifest.json",
        "demo/\u0661/manifest.json",
    ],
)
def test_an_address_that_is_not_run_attempt_manifest_is_refused(place: Place, uri: str) -> None:
    with pytest.raises(CheckpointRefused):
        place.store.fetch(uri, "00")
    with pytest.raises(CheckpointRefused):
        place.store.delete(uri)


@pytest.mark.parametrize(
    "name",
    ["../b/model.safetensors", "/etc/x.json", "sub/x.json", "x.bin", "x.pkl", "x.py", ".hidden.json", "a%2fb.json", ""],
)
def test_a_manifest_that_lists_such_a_name_is_refused(place: Place, name: str) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    data = place.read("demo/a1/manifest.json").replace(b'"config.json"', b'"' + name.encode() + b'"')
    place.overwrite("demo/a1/manifest.json", data)

    with pytest.raises(CheckpointRefused, match="only plain names"):
        place.open_again().fetch(saved.manifest_uri, hashlib.sha256(data).hexdigest())


def test_a_manifest_that_asks_for_too_much_is_invalid_before_anything_is_read(place: Place) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    data = place.read("demo/a1/manifest.json").replace(b'"bytes": 20', b'"bytes": 2000000000000')
    place.overwrite("demo/a1/manifest.json", data)

    with pytest.raises(CheckpointInvalid, match="at most 1,048,576"):
        place.open_again().fetch(saved.manifest_uri, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("name", ["model.bin", "weights.pt", "evil.py", ".hidden"])
def test_a_file_that_no_reader_would_accept_is_not_saved(place: Place, name: str) -> None:
    with pytest.raises(CheckpointRefused, match=name):
        place.store.save("a1", lambda directory: _touch(directory / name), manifest_for("a1"))

    assert place.names() == []


def test_a_folder_or_a_link_is_not_saved(place: Place) -> None:
    with pytest.raises(CheckpointRefused, match="not a regular file"):
        place.store.save("a1", lambda directory: (directory / "x.json").mkdir(), manifest_for("a1"))
    with pytest.raises(CheckpointRefused, match="not a regular file"):
        place.store.save("a1", lambda directory: os.symlink("/etc/hostname", directory / "x.json"), manifest_for("a1"))

    assert place.names() == []


def test_too_many_files_and_too_many_bytes_are_not_saved(place: Place) -> None:
    def many(directory: Path) -> None:
        for index in range(9):
            _touch(directory / f"{index}.json")

    with pytest.raises(CheckpointInvalid, match="9 files, at most 8"):
        place.store.save("a1", many, manifest_for("a1"))
    with pytest.raises(CheckpointInvalid, match="raise the store's limit"):
        place.store.save("a1", lambda d: _touch(d / "x.arrow", (1 << 20) + 1), manifest_for("a1"))

    assert place.names() == []


@pytest.mark.parametrize("attempt_id", ["", "../x", "a/b", ".a", "a" * 129])
def test_an_attempt_id_is_one_plain_name(place: Place, attempt_id: str) -> None:
    with pytest.raises(ValueError, match="attempt id"):
        place.store.save(attempt_id, write_checkpoint, manifest_for(attempt_id))


def test_a_manifest_for_another_attempt_or_run_is_not_saved(place: Place) -> None:
    with pytest.raises(ValueError, match="given for demo/a1"):
        place.store.save("a1", write_checkpoint, manifest_for("a2"))
    with pytest.raises(ValueError, match="given for demo/a1"):
        place.store.save("a1", write_checkpoint, manifest_for("a1", run="other"))


def test_a_disk_that_fills_up_leaves_the_previous_version_alone(place: Place) -> None:
    saved = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    before = place.names()

    def fills_up(directory: Path) -> None:
        (directory / WEIGHTS_NAME).write_bytes(WEIGHTS[:4_000])
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreFull, match=r"demo/a2: needs at least [\d,]+ bytes, [\d,]+ bytes are free"):
        place.store.save("a2", fills_up, manifest_for("a2"))

    assert place.names() == before
    assert place.store.attempts() == ["a1"]
    assert place.open_again().fetch(saved.manifest_uri, saved.manifest_sha256)[1].attempt_id == "a1"


def test_no_space_wrapped_in_a_librarys_own_error_is_recognised(place: Place) -> None:
    def fills_up(directory: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(StoreFull):
        place.store.save("a1", fills_up, manifest_for("a1"))


def test_another_error_of_the_writer_stays_what_it_is(place: Place) -> None:
    def fails(directory: Path) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        place.store.save("a1", fails, manifest_for("a1"))


def test_delete_removes_one_version_and_can_be_repeated(place: Place) -> None:
    first = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    second = place.store.save("a2", write_checkpoint, manifest_for("a2"))

    place.store.delete(first.manifest_uri)
    place.store.delete(first.manifest_uri)

    assert place.store.attempts() == ["a2"]
    assert all(name.startswith("demo/a2/") for name in place.names())
    with pytest.raises(CheckpointMissing):
        place.open_again().fetch(first.manifest_uri, first.manifest_sha256)
    assert place.open_again().fetch(second.manifest_uri, second.manifest_sha256)[1].attempt_id == "a2"


def test_another_runs_versions_can_be_read_but_not_deleted(place: Place) -> None:
    place.overwrite(f"other/a1/{WEIGHTS_NAME}", WEIGHTS)

    with pytest.raises(CheckpointRefused, match="only its own"):
        place.store.delete("other/a1/manifest.json")
    assert place.names() == [f"other/a1/{WEIGHTS_NAME}"]


def test_garbage_is_what_no_event_names_once_it_is_old_enough(place: Place) -> None:
    kept = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    place.store.save("zombie", write_checkpoint, manifest_for("zombie"))
    place.overwrite(f"demo/torn/{WEIGHTS_NAME}", WEIGHTS)

    assert place.store.collect_garbage([kept.manifest_uri], grace_s=HOUR_S, now_us=1_000_000, at_most=9) == []
    removed = place.store.collect_garbage([kept.manifest_uri], grace_s=HOUR_S, now_us=MUCH_LATER_US, at_most=9)

    assert sorted(removed) == ["torn", "zombie"]
    assert place.store.attempts() == ["a1"]


def test_one_call_removes_no_more_than_it_is_allowed_to(place: Place) -> None:
    kept = place.store.save("a1", write_checkpoint, manifest_for("a1"))
    for name in ("z1", "z2", "z3"):
        place.store.save(name, write_checkpoint, manifest_for(name))
    calls = [
        place.store.collect_garbage([kept.manifest_uri], grace_s=HOUR_S, now_us=MUCH_LATER_US, at_most=2)
        for _ in range(3)
    ]

    assert [len(removed) for removed in calls] == [2, 1, 0]
    assert place.store.attempts() == ["a1"]


def test_garbage_collection_that_has_read_no_event_removes_no_version(place: Place) -> None:
    place.store.save("a1", write_checkpoint, manifest_for("a1"))

    assert place.store.collect_garbage([], grace_s=0.0, now_us=MUCH_LATER_US, at_most=9) == []
    assert place.store.attempts() == ["a1"]


def _touch(path: Path, size: int = 1) -> None:
    path.write_bytes(b"x" * size)
