"""What a careful forger does to a small run's log and store: headers that fit the bytes, hashes that fit the rows.

Each tool gives, or is, a change: a function of the forger on a log and the folder of a copy of the checkpoints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schemas import policy_events as ev
from schemas.checkpoint import MANIFEST_NAME, OPTIMIZER_NAME, WEIGHTS_NAME, Manifest
from schemas.headers import is_arrow
from schemas.ledger import Decision, DecisionRow, Position, StepCompleted, Subject
from schemas.ledger_codec import decisions_headers, decode_decisions, encode_decisions
from schemas.row_hash import batch_digest, row_sha256
from schemas.scores_codec import decode_scores, encode_scores, scores_headers
from schemas.topics import TopicName
from schemas.trajectory import Trajectory
from schemas.trajectory_codec import decode_group, encode_group, group_message_headers
from schemas.trajectory_validate import WRITER_LIMITS
from tests.fakes.tiny_forge import Forge

ROW = "sim/p000037/e0/a0/1"
"""trained into version 1, from version 0"""
GROUP, OTHER_GROUP = "sim/p000037/e0/a0", "sim/p000097/e0/a0"
Change = Callable[[Forge, Path], object]
"""the forger's tools on a log, and the folder of a copy of the checkpoints"""


# ---------------------------------------------------------------------- rows


def row(**changes: Any) -> Change:
    return lambda forge, _: forge.edit_trajectory(ROW, **changes)


def edited(edit: Callable[[Trajectory], dict[str, Any]]) -> Change:
    return lambda forge, _: forge.edit_trajectory(ROW, **edit(row_of(forge)))


def row_of(forge: Forge, trajectory_id: str = ROW) -> Trajectory:
    """As it lies in the log."""
    return next(row for _, rows in groups(forge) for row in rows if row.trajectory_id == trajectory_id)


def groups(forge: Forge) -> list[tuple[Any, list[Trajectory]]]:
    return [
        (
            record,
            [row.trajectory for row in decode_group(record.value, record.headers, WRITER_LIMITS) if row.trajectory],
        )
        for record in forge.records(TopicName.TRAJECTORIES)
        if is_arrow(record.headers)
    ]


def record_of(forge: Forge, group_id: str) -> Any:
    return next(record for record, rows in groups(forge) if rows[0].group_id == group_id)


def another_token(row: Trajectory) -> dict[str, Any]:
    tokens = row.token_ids.copy()
    tokens[0] = tokens[0] - 1 if tokens[0] else 1
    return {"token_ids": tokens}


def another_logprob(row: Trajectory) -> dict[str, Any]:
    return {"logprobs": row.logprobs - np.float32(0.5)}


def masked(row: Trajectory) -> dict[str, Any]:
    mask, logprobs = row.loss_mask.copy(), row.logprobs.copy()
    mask[0], logprobs[0] = False, 0.0
    return {"loss_mask": mask, "logprobs": logprobs}


def swap(forge: Forge, _: Path) -> None:
    one, two = record_of(forge, GROUP), record_of(forge, OTHER_GROUP)
    forge.rewrite(one, key=two.key, value=two.value, headers=two.headers)
    forge.rewrite(two, key=one.key, value=one.value, headers=one.headers)


def copy_over(forge: Forge, _: Path) -> None:
    one, two = record_of(forge, GROUP), record_of(forge, OTHER_GROUP)
    forge.rewrite(two, key=one.key, value=one.value, headers=one.headers)


def turn_round(forge: Forge, _: Path) -> None:
    record, rows = next(found for found in groups(forge) if found[1][0].group_id == GROUP)
    value = encode_group(rows[::-1])
    forge.rewrite(record, value=value, headers=group_message_headers(rows[::-1], value, "forger"))


def one_less(forge: Forge, _: Path) -> None:
    record, rows = next(found for found in groups(forge) if found[1][0].group_id == GROUP)
    value = encode_group(rows[:-1])
    forge.rewrite(record, value=value, headers=group_message_headers(rows[:-1], value, "forger"))


def cut_off(forge: Forge, _: Path) -> None:
    found = record_of(forge, GROUP)
    del forge.log.partition(found.topic, found.partition).entries[found.offset :]


def remove(name: TopicName, number: int) -> Change:
    return lambda forge, _: forge.remove(forge.records(name)[number])


def flip(name: TopicName, number: int, at: int) -> Change:
    return lambda forge, _: forge.flip_byte(forge.records(name)[number], at)


# ---------------------------------------------------------------------- ledger


def decision(**changes: Any) -> Change:
    return lambda forge, _: forge.edit_decision(ROW, **changes)


def reverse(forge: Forge, _: Path) -> None:
    forge.edit_decisions(1, lambda rows: rows[::-1])


def flip_decision(forge: Forge, _: Path) -> None:
    forge.edit_decision(ROW, decision=Decision.DROPPED, reason="incomplete", weight=0.0, use_count=0, advantage=None)


def train_what_was_dropped(forge: Forge, _: Path) -> None:
    """A row that was too old, in the transaction that dropped it."""
    for record in forge.records(TopicName.LEDGER):
        rows = decode_decisions(record.value, record.headers) if is_arrow(record.headers) else ()
        if not any(row.reason == "stale" for row in rows):
            continue
        stale = next(row for row in rows if row.reason == "stale" and row.trajectory_id)
        trained = dataclasses.replace(
            stale, decision=Decision.TRAINED, reason="", policy_lag=1, weight=1.0, use_count=1, advantage=0.0
        )
        edited = [trained if row is stale else row for row in rows]
        value = encode_decisions(edited)
        forge.rewrite(record, value=value, headers=decisions_headers(edited, value, "forger"))
        return
    raise AssertionError("nothing was dropped as stale")


def step(number: int, **changes: Any) -> Change:
    return lambda forge, _: forge.edit_control(StepCompleted, number, **changes)


def position(edit: Callable[[Position], dict[str, Any]]) -> Change:
    """Of the step that made version 2."""

    def change(forge: Forge, _: Path) -> None:
        controls = [t.control for t in forge.run.run_log().transactions()]
        step = [control for control in controls if isinstance(control, StepCompleted)][1]
        forge.edit_control(StepCompleted, 1, position=step.position.model_copy(update=edit(step.position)))

    return change


def offset_moved(position: Position) -> dict[str, Any]:
    moved = {p: q.model_copy(update={"next_offset": q.next_offset + 1}) for p, q in position.partitions.items()}
    return {"partitions": moved}


# ---------------------------------------------------------------------- events


def event(kind: type[ev.PolicyEvent], number: int, **changes: Any) -> Change:
    return lambda forge, _: forge.edit_event(kind, number, **changes)


def no_event(kind: type[ev.PolicyEvent], number: int) -> Change:
    return lambda forge, _: forge.remove(forge.policy_records(kind)[number])


def forged_version(forge: Forge, _: Path) -> None:
    """In the place of a heartbeat-like event that nobody would miss: a version nobody trained."""
    joined = forge.policy_records(ev.WorkerJoined)[0]
    published = forge.policy_records(ev.VersionPublished)[0]
    forge.rewrite(joined, value=published.value, headers=published.headers)


def activated_too_early(forge: Forge, _: Path) -> None:
    proof, live = forge.policy_records(ev.VersionLoaded)[1], forge.policy_records(ev.VersionActivated)[1]
    forge.rewrite(proof, value=live.value, headers=live.headers)
    forge.rewrite(live, value=proof.value, headers=proof.headers)


def stamp_of_an_event(forge: Forge, _: Path) -> None:
    record = forge.policy_records(ev.WorkerJoined)[0]
    assert record.value is not None
    forge.flip_byte(record, record.value.index(b'"hf"') + 2)


# ---------------------------------------------------------------------- scores


def other_scores(forge: Forge, _: Path) -> None:
    for record in forge.records(TopicName.SCORES):
        rows = decode_scores(record.value, record.headers)
        if any(row.trajectory_id == ROW for row in rows):
            edited = [
                dataclasses.replace(row, proximal=row.proximal - np.float32(0.25 * (row.trajectory_id == ROW)))
                for row in rows
            ]
            value = encode_scores(edited)
            forge.rewrite(record, value=value, headers=scores_headers(edited, value, "trainer", 1))
            return
    raise AssertionError(f"{ROW} was not scored")


# ---------------------------------------------------------------------- files


def directory(forge: Forge, folder: Path, version: int) -> Path:
    """Of a version, in the copy."""
    published = forge.policy_records(ev.VersionPublished)[version]
    uri = json.loads(published.value or b"")["manifest_uri"]
    return folder / Path(str(uri)).parent


def writable(path: Path) -> Path:
    path.chmod(0o600)
    return path


def file(version: int, name: str, edit: Callable[[bytes], bytes]) -> Change:
    def change(forge: Forge, folder: Path) -> None:
        path = writable(directory(forge, folder, version) / name)
        path.write_bytes(edit(path.read_bytes()))

    return change


def one_bit(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def no_file(version: int, name: str) -> Change:
    return lambda forge, folder: (directory(forge, folder, version) / name).unlink()


def new_file(forge: Forge, folder: Path) -> None:
    (directory(forge, folder, 1) / "adapter.bin").write_bytes(b"load me")


def swapped_state(forge: Forge, folder: Path) -> None:
    one, two = (writable(directory(forge, folder, version) / OPTIMIZER_NAME) for version in (1, 2))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)


def manifest_that_fits(forge: Forge, folder: Path) -> None:
    """Other weights, and a manifest with their sha256."""
    where = directory(forge, folder, 2)
    weights, path = writable(where / WEIGHTS_NAME), writable(where / MANIFEST_NAME)
    weights.write_bytes(one_bit(weights.read_bytes()))
    manifest = Manifest.model_validate_json(path.read_bytes())
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    files = tuple(f.model_copy(update={"sha256": sha256}) if f.name == WEIGHTS_NAME else f for f in manifest.files)
    path.write_bytes(manifest.model_copy(update={"files": files}).encode())


def manifest_and_event_that_fit(forge: Forge, folder: Path) -> None:
    """And the event names the new manifest: the workers' proofs are of other bytes now."""
    manifest_that_fits(forge, folder)
    data = (directory(forge, folder, 2) / MANIFEST_NAME).read_bytes()
    forge.edit_event(ev.VersionPublished, 2, manifest_sha256=hashlib.sha256(data).hexdigest())


def another_version_in_its_place(forge: Forge, folder: Path) -> None:
    shutil.rmtree(directory(forge, folder, 2))
    shutil.copytree(directory(forge, folder, 1), directory(forge, folder, 2))


# ---------------------------------------------------------------------- what only the weights can tell


def forge_row(forge: Forge, trajectory_id: str, **changes: Any) -> None:
    """Another row, and a ledger that fits it in every hash and count."""
    forge.edit_trajectory(trajectory_id, **changes)
    digest = row_sha256(row_of(forge, trajectory_id))
    forge.edit_decision(trajectory_id, row_sha256=digest)
    for number, step in enumerate(steps(forge)):
        hashes = [r.row_sha256 or "" for r in step if r.subject is Subject.TRAJECTORY and r.use_count > 0]
        forge.edit_control(StepCompleted, number, batch_digest=batch_digest(hashes))


def steps(forge: Forge) -> list[Sequence[DecisionRow]]:
    return [t.decisions for t in forge.run.run_log().transactions() if isinstance(t.control, StepCompleted)]


def other_numbers_that_fit(forge: Forge, _: Path) -> None:
    forge_row(forge, ROW, **another_logprob(row_of(forge)))


LIES = "sim/p000095/e0/a0/0"
"""trained into version 2 with lag 1: sampled by version 0"""


def stamp_that_fits(forge: Forge, _: Path) -> None:
    """A row of version 0 that says version 1, with the proof its worker has of that, and the lag that follows."""
    proof = forge.policy_records(ev.VersionLoaded)[1].offset
    row = row_of(forge, LIES)
    forge_row(forge, LIES, segments=tuple(dataclasses.replace(s, version=1, proof=proof) for s in row.segments))
    forge.edit_decision(LIES, policy_lag=0)
