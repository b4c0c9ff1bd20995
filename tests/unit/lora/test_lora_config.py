"""[lora]: what is refused, what is part of the digest, and what the learner is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftlog.learning_settings import learner_settings
from driftlog.policies import base_directory
from driftlog.run_directory import RunDirectory
from infra.config import changed_keys, learning_settings, parse_config
from schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 4, "dropout": 0.1}, "lora.dropout = 0.1: dropout is off everywhere"),
        ({"dropout": 0.1}, "lora.dropout = 0.1"),
        ({"rank": 4, "target_modules": []}, "lora.target_modules is empty"),
        ({"rank": -1}, "lora.rank"),
        ({"rank": 4, "alpha": 0}, "lora.alpha"),
        ({"rank": 4, "publish": "both"}, "lora.publish"),
    ],
)
def test_settings_that_cannot_work_are_refused(lora: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"lora": lora}, "test")


def test_shards_with_adapters_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r'adapters are not sharded.*trainer.parallel = "ddp"'):
        parse_config({"lora": {"rank": 4}, "trainer": {"parallel": "fsdp"}}, "test")


def test_without_adapters_the_digest_says_nothing_of_them_and_with_them_every_key_counts() -> None:
    off, on, more = (
        parse_config({"lora": lora}, "test")
        for lora in ({"alpha": 3.0}, {"rank": 4}, {"rank": 4, "publish": "adapter"})
    )

    assert off.digest() == parse_config({}, "test").digest()
    assert "lora" not in learning_settings(off)
    assert len({config.digest() for config in (off, on, more)}) == 3
    assert changed_keys(learning_settings(on), learning_settings(more)) == ["lora.publish: 'merged' -> 'adapter'"]


def test_the_learner_is_told_of_adapters_on_the_initial_policy() -> None:
    assert learner_settings(parse_config({}, "test"), "/initial").lora is None
    config = parse_config({"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj"]}}, "test")

    lora = learner_settings(config, "/initial").lora

    assert lora is not None
    assert (lora.rank, lora.scale, lora.target_modules, lora.publish) == (4, 2.0, ("q_proj",), "merged")
    assert lora.base_directory == Path("/initial")


def test_only_versions_that_are_adapters_have_a_base_and_a_missing_one_is_for_the_load_to_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "demo")
    model = {"init": str(tmp_path / "nowhere")}

    assert base_directory(parse_config({"model": model, "lora": {"rank": 4}}, "test"), run) is None
    config = parse_config({"model": model, "lora": {"rank": 4, "publish": "adapter"}}, "test")
    assert base_directory(config, run) == tmp_path / "nowhere"
