"""manifest.json: what a checkpoint directory holds, and everything needed to train it again."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import CheckpointInvalid

MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "model.safetensors"
PROBE_NAME = "probe.arrow"
OPTIMIZER_NAME = "optimizer.safetensors"
TRAINER_STATE_NAME = "trainer_state.json"
# A version that is an adapter has these in the place of WEIGHTS_NAME.
ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
BASE_NAME = "base.json"


class ManifestFile(BaseModel):
    """One file of the directory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """file name without a folder"""
    bytes: int
    sha256: str


class LoraRecord(BaseModel):
    """The adapter that was trained, and whether it or whole weights were published."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int
    alpha: float
    publish: Literal["merged", "adapter"]
    modules: int
    """weights that have an adapter"""
    base_sha256: str
    """the base model: sha256 over the names and sha256 of its weight files"""


class Manifest(BaseModel):
    """Contents of manifest.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    attempt_id: str
    parent: int | None
    """version this was trained from; None for version 0"""
    files: tuple[ManifestFile, ...] = ()
    """every file but manifest.json itself, sorted by name; filled in by the store"""
    dtype: dict[str, str]
    """tensor group -> dtype"""
    tied: tuple[tuple[str, ...], ...] = ()
    """names of tensors that share storage; only the first is in the file"""
    probe_sha256: str = ""
    """of the probe's file, once more; filled in by the store, empty where there is none"""
    fingerprint: dict[str, str]
    optimizer_step: int
    has_state: bool
    """optimizer and RNG state are there: training can go on from here"""
    library_versions: dict[str, str]
    threads: int
    ranks: int = Field(default=1, exclude_if=lambda ranks: ranks == 1)
    """processes of the trainer; like the threads they decide the last bits"""
    lora: LoraRecord | None = Field(default=None, exclude_if=lambda lora: lora is None)
    """None: every weight is trained"""
    device_type: str
    logprob_chunk: int
    code_revision: str
    config_digest: str

    def file(self, name: str) -> ManifestFile:
        """The entry of that name; CheckpointInvalid when there is none."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise CheckpointInvalid(f"manifest of {self.attempt_id} has no file {name!r}")

    def describing(self, files: tuple[ManifestFile, ...]) -> Manifest:
        """The manifest of a directory with these files."""
        probe_sha256 = next((entry.sha256 for entry in files if entry.name == PROBE_NAME), "")
        return self.model_copy(update={"files": files, "probe_sha256": probe_sha256})

    def encode(self) -> bytes:
        """Canonical bytes; their sha256 stands in VersionPublished."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def decode_manifest(data: bytes, sha256: str | None = None) -> Manifest:
    """Read manifest bytes, checking them against the event's hash first when it is given."""
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointInvalid(
            f"manifest.json has sha256 {hashlib.sha256(data).hexdigest()[:12]}..., the event says {sha256[:12]}..."
        )
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise CheckpointInvalid(f"manifest.json: {error}") from error
