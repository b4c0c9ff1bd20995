"""The stored configuration of a run: resumed, extended, refused, recorded; one owner at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driftlog.options import config_of
from driftlog.reanalysis_rules import changed_config
from driftlog.run_directory import RunDirectory, find_run, read_config
from infra.config import Config, parse_config
from schemas.errors import ConfigError, UsageError


def _config(**sections: dict[str, object]) -> Config:
    return parse_config({"run": {"name": "demo"}, **sections}, "test")


def test_the_first_launch_stores_the_resolved_configuration(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "demo")

    assert run.stored_config() is None
    assert run.adopt(_config(), accept_changes=False) == []
    assert run.stored_config() == _config()


def test_more_versions_extend_a_run_under_the_same_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "demo")
    run.adopt(_config(), accept_changes=False)

    assert run.adopt(_config(run={"name": "demo", "versions": 500}), accept_changes=False) == []

    assert [path.name for path in run.config_files()] == ["config.json"]
    stored = run.stored_config()
    assert stored is not None
    assert stored.run.versions == 500


def test_a_changed_learning_setting_is_refused_by_its_key(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "demo")
    run.adopt(_config(), accept_changes=False)

    with pytest.raises(ConfigError, match=r"trainer\.max_lag: 2 -> 1.*--accept-changes"):
        run.adopt(_config(trainer={"max_lag": 1}), accept_changes=False)

    assert run.stored_config() == _config()


def test_an_accepted_change_is_recorded_as_a_new_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "demo")
    run.adopt(_config(), accept_changes=False)

    changes = run.adopt(_config(trainer={"max_lag": 1}), accept_changes=True)

    assert changes == ["trainer.max_lag: 2 -> 1"]
    assert [path.name for path in run.config_files()] == ["config.json", "config.1.json"]
    assert read_config(run.config_files()[0]) == _config()
    assert run.stored_config() == _config(trainer={"max_lag": 1})


def test_files_are_ordered_by_number_and_not_by_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "demo")
    run.adopt(_config(), accept_changes=False)
    for number in range(1, 12):
        run.adopt(_config(trainer={"max_lag": number + 2}), accept_changes=True)

    assert [path.name for path in run.config_files()][-2:] == ["config.10.json", "config.11.json"]


def test_a_run_has_one_owner_and_names_it(tmp_path: Path) -> None:
    run, again = RunDirectory(tmp_path, "demo"), RunDirectory(tmp_path, "demo")

    with run.held():
        assert again.owner() is not None
        with pytest.raises(UsageError, match="already going"), again.held():
            pass
    assert again.owner() is None


def test_the_run_used_last_is_found_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="driftlog up"):
        find_run(tmp_path, None)
    RunDirectory(tmp_path, "one").adopt(_config(), accept_changes=False)

    assert find_run(tmp_path, None).name == "one"
    with pytest.raises(UsageError, match=r"no run 'two'.*one"):
        find_run(tmp_path, "two")


def test_a_stored_configuration_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")

    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path / "config.json")


def test_a_run_made_before_its_waits_were_checked_can_still_be_read_and_judged_again(tmp_path: Path) -> None:
    waits = {"coordinator": {"switch_deadline_s": 30.0}, "generator": {"park_timeout_s": 60.0}}
    with pytest.raises(ConfigError, match="coordinator.switch_deadline_s = 30"):
        _config(**waits)
    stored = _config().model_dump(mode="json")
    for section, values in waits.items():
        stored[section] |= values
    (tmp_path / "config.json").write_text(json.dumps(stored))

    config = read_config(tmp_path / "config.json")

    assert (config.coordinator.switch_deadline_s, config.generator.park_timeout_s) == (30, 60)
    assert changed_config(config, ["trainer.max_lag=1"]).trainer.max_lag == 1


def test_set_does_not_go_with_a_stored_configuration(tmp_path: Path) -> None:
    import argparse

    options = argparse.Namespace(config=tmp_path / "config.json", run=None, overrides=["run.versions=1"])

    with pytest.raises(ConfigError, match="--set"):
        config_of(options)


def test_a_configuration_is_found_by_the_digest_another_build_gave_it(tmp_path: Path) -> None:
    """A build with more settings makes another digest of the same file: both name it."""
    run = RunDirectory(tmp_path, "demo")
    run.adopt(_config(), accept_changes=False)
    digests = run.path / "digests.json"
    [(now, name)] = json.loads(digests.read_text()).items()
    digests.write_text(json.dumps({"0" * 64: name}))
    run.adopt(_config(trainer={"max_lag": 1}), accept_changes=True)

    found = run.configs_by_digest()
    assert {digest: config.trainer.max_lag for digest, config in found.items()} == {
        "0" * 64: 2, now: 2, _config(trainer={"max_lag": 1}).digest(): 1,
    }  # fmt: skip
