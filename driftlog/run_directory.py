"""What lies where in `<directory>/<run>/`, and the stored configuration of a run.

    config.json, config.N.json   the resolved configuration; the highest N is in force, each change of a
                                 learning setting that was accepted starts a new file
    broker/  policy/  checkpoints/  logs/  pids/  summary.json  greedy.json

Guarantees: files are replaced whole; one `driftlog up` at a time holds a run.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driftlog.task_wiring import check_same_prompts
from infra.config import Config, changed_keys, learning_settings, parse_config
from infra.whole_files import write_whole
from schemas.errors import ConfigError, UsageError


class RunDirectory:
    """Paths of one run. Nothing is created until something is written."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self.name = name
        self.broker = self.path / "broker"
        """data of the embedded broker, and its broker.json while it runs"""
        self.policy = self.path / "policy"
        """initial policy, when it is a preset"""
        self.logs = self.path / "logs"
        self.pids = self.path / "pids"
        self.summary = self.path / "summary.json"
        self.greedy = self.path / "greedy.json"

    def checkpoints(self, config: Config) -> str:
        """Root of the checkpoint store."""
        return config.checkpoints.root or str(self.path / "checkpoints")

    # ------------------------------------------------------------ the stored configuration

    def config_files(self) -> list[Path]:
        """config.json, config.1.json, ... in order; the last is in force."""
        numbered = [
            (int(path.name.split(".")[1]), path)
            for path in self.path.glob("config.*.json")
            if path.name.split(".")[1].isdecimal()
        ]
        first = [self.path / "config.json"] if (self.path / "config.json").exists() else []
        return first + [path for _, path in sorted(numbered)]

    def stored_config(self) -> Config | None:
        """The configuration in force; None for a run that never began."""
        files = self.config_files()
        return read_config(files[-1]) if files else None

    def adopt(self, config: Config, *, accept_changes: bool) -> list[str]:
        """Store the configuration for a new, resumed or extended run; the learning settings it changes.

        ConfigError names them unless they are accepted: a run whose settings changed half-way is another experiment.
        """
        stored = self.stored_config()
        if stored is None:
            write_json(self.path / "config.json", config.model_dump(mode="json"))
            self._remember_digest(config, self.path / "config.json")
            return []
        check_same_prompts(stored, config)
        changes = changed_keys(learning_settings(stored), learning_settings(config))
        if changes and not accept_changes:
            raise ConfigError(
                f"run {self.name!r} exists with other learning settings: {'; '.join(changes)}. Use another --run NAME, "
                "the old settings, or --accept-changes (recorded with the run)"
            )
        files = self.config_files()
        path = self.path / f"config.{len(files)}.json" if changes else files[-1]
        write_json(path, config.model_dump(mode="json"))
        self._remember_digest(config, path)
        return changes

    def configs_by_digest(self) -> dict[str, Config]:
        """The configurations by every digest the log may know them under.

        A digest is what the build made of the settings when it trained: a later build that has more of them makes
        another one of the same file, so each is remembered when the configuration is adopted."""
        known = {config.digest(): config for config in map(read_config, self.config_files())}
        remembered = _read_object(self._digests) if self._digests.exists() else {}
        return known | {digest: read_config(self.path / str(name)) for digest, name in remembered.items()}

    def _remember_digest(self, config: Config, path: Path) -> None:
        known = _read_object(self._digests) if self._digests.exists() else {}
        if config.digest() not in known:
            write_json(self._digests, {**known, config.digest(): path.name})

    @property
    def _digests(self) -> Path:
        """digest -> name of the configuration's file"""
        return self.path / "digests.json"

    # ------------------------------------------------------------ one owner at a time

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run for this process; UsageError names the process that holds it already."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "up.lock").open("a+", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                raise UsageError(
                    f"run {self.name!r} is already going (`driftlog up`, process {owner}): "
                    f"stop it with `driftlog down --run {self.name}`, or choose another --run NAME"
                ) from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            try:
                yield
            finally:
                lock.truncate(0)

    def owner(self) -> int | None:
        """Process id of the `driftlog up` that holds the run; None when nobody does."""
        path = self.path / "up.lock"
        if not path.exists():
            return None
        with path.open("r", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = lock.read().strip()
                return int(text) if text.isdecimal() else None
        return None


def find_run(directory: Path, name: str | None) -> RunDirectory:
    """The run of that name, or the one used last. UsageError says which runs there are."""
    runs = sorted(
        (path for path in directory.glob("*") if (path / "config.json").is_file()),
        key=lambda path: path.stat().st_mtime,
    )
    names = ", ".join(path.name for path in runs) or "none"
    if name is None:
        if not runs:
            raise UsageError(f"no run in {directory}: start one with `driftlog up --config configs/countdown.toml`")
        return RunDirectory(directory, runs[-1].name)
    if name not in {path.name for path in runs}:
        raise UsageError(f"no run {name!r} in {directory} (there: {names}); name its folder with --directory")
    return RunDirectory(directory, name)


def read_config(path: Path) -> Config:
    """A stored, resolved configuration."""
    return parse_config(_read_object(path), str(path), is_stored=True)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return data


def write_json(path: Path, content: Any) -> None:
    """Replace a file whole: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
