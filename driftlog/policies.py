"""The initial policy of a run: a model directory of the user's, or a preset that is made once.

Making a preset costs seconds and gives the same bytes every time; the processes of a run wait for one another.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from driftlog.run_directory import RunDirectory
from infra.config import Config
from schemas.errors import EnvironmentMissing

PRESET_NAMES = ("countdown-tiny",)


def check_initial_policy(config: Config) -> None:
    """Refuse what cannot be a policy, without loading anything heavy. EnvironmentMissing says what is missing."""
    if config.model.init in PRESET_NAMES:
        return
    directory = Path(config.model.init)
    presets = ", ".join(PRESET_NAMES)
    if not directory.is_dir():
        raise EnvironmentMissing(
            f"model.init = {config.model.init!r} is neither a preset ({presets}) nor the directory of a "
            "Hugging Face model"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise EnvironmentMissing(f"model.init: {directory} has no {name}: it is not a Hugging Face model directory")
    if not any(directory.glob("*.safetensors")):
        raise EnvironmentMissing(f"model.init: {directory} has no *.safetensors: other weight formats are not read")


def check_learning(config: Config) -> None:
    """Refuse what the maths refuses, before anything is started; loads torch only where a preset was changed."""
    if config.objective.overrides or config.trainer.schedule != "constant" or config.reference.directory:
        from driftlog import learning_settings

        learning_settings.check_learning(config)


def initial_policy(config: Config, run: RunDirectory) -> Path:
    """The directory of the initial policy, made now when it is a preset that is not there yet."""
    check_initial_policy(config)
    if config.model.init not in PRESET_NAMES:
        return Path(config.model.init)
    if not run.policy.is_dir():
        run.path.mkdir(parents=True, exist_ok=True)
        with (run.path / "policy.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not run.policy.is_dir():
                make_preset(config.model.init, config.run.seed, run.policy)
    return run.policy


def base_directory(config: Config, run: RunDirectory) -> Path | None:
    """The model that versions published as adapters are on, also where it is not there; None: the run has none such.

    Whoever loads such a version says what is wrong with the base; a preset is made here as anywhere."""
    if not config.lora.rank or config.lora.publish != "adapter":
        return None
    return initial_policy(config, run) if config.model.init in PRESET_NAMES else Path(config.model.init)


def make_preset(preset: str, seed: int, directory: Path) -> None:
    """Build and warm-start a preset; the directory appears whole or not at all."""
    from infra.model_presets import warm_start

    scratch = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        warm_start(preset, seed, scratch)
        os.replace(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
