"""Options that many commands share, and how a run is found from them."""

from __future__ import annotations

import argparse
from pathlib import Path

from driftlog.run_directory import RunDirectory, find_run, read_config
from infra.config import Config, load_config
from schemas.errors import ConfigError

DEFAULT_DIRECTORY = "runs"


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """--config, --run, --set: for commands that start something."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML, the config.json stored with a run, or the folder of a run"
    )
    parser.add_argument("--run", metavar="NAME", help="run name; the same name resumes or extends a run")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="change one setting (repeatable)"
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """--run, --directory: for commands that read a run."""
    parser.add_argument("--run", metavar="NAME", help="run name (default: the run started last)")
    parser.add_argument(
        "--directory", type=Path, default=Path(DEFAULT_DIRECTORY), metavar="DIR", help="where runs lie (default: runs)"
    )


def add_branch_option(parser: argparse.ArgumentParser) -> None:
    """--from-version."""
    parser.add_argument(
        "--from-version", type=int, metavar="N",
        help="go on from version N: its weights under a new number; what came after it stays as another branch",
    )  # fmt: skip


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="data as JSON on stdout")


def config_of(options: argparse.Namespace) -> tuple[Config, RunDirectory]:
    """The configuration a command was given, and where its run lies."""
    overrides = list(options.overrides)
    if options.run is not None:
        overrides.append(f'run.name="{options.run}"')
    path: Path | None = options.config
    if path is not None and path.is_dir():
        path = _stored_in(path)
    if path is not None and path.suffix == ".json":
        if options.overrides:
            raise ConfigError("--set goes with a TOML file, not with a stored config.json")
        config = read_config(path)
    else:
        config = load_config(path, overrides)
    return config, RunDirectory(Path(config.run.directory), config.run.name)


def _stored_in(folder: Path) -> Path:
    """The configuration in force of the run in this folder."""
    files = RunDirectory(folder.parent, folder.name).config_files()
    if not files:
        raise ConfigError(f"--config {folder}: no config.json in this folder; `driftlog prepare` puts it there")
    return files[-1]


def run_of(options: argparse.Namespace) -> tuple[Config, RunDirectory]:
    """The run a command reads, and its stored configuration."""
    run = find_run(options.directory, options.run)
    config = run.stored_config()
    assert config is not None, "find_run lists only runs with a configuration"
    return config, run
