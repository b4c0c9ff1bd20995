"""A real model through the whole of it: out of its GGUF, its own tokenizer and chat template, the vllm engine.

Runs by `make test-vllm`, in the environment that has the packages; skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from driftlog.demo_model import PACKAGE, make
from infra.model import load_policy
from tests.e2e.driving import ROOT, command, environment

NEEDED = (PACKAGE, "gguf", "accelerate", "vllm")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: make test-vllm"),
]
RUN_LIMIT_S = 900.0
"""the engine alone takes minutes to start on a machine that does other work"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model directory, converted once; conversion itself checks that the model answers a question."""
    directory = tmp_path_factory.mktemp("models") / "smollm2"
    made = make(directory)
    assert (made["made"], made["parameters"]) == (True, 134_515_008)
    return directory


def test_digits_and_control_words_are_tokens_of_their_own(model: Path) -> None:
    policy = load_policy(model)
    text = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": "12 + 3"}], add_generation_prompt=True, tokenize=False
    )
    ids = policy.encode(text)

    assert policy.decode_all([ids])[0].count("12 + 3") == 1
    assert ids.count(policy.eos_token_id) == 2  # the system's turn and the user's
    assert len(policy.encode("12")) == 2


def test_two_versions_are_trained_through_vllm_and_the_audit_finds_nothing(
    model: Path, tmp_path: Path, kafka_jars: Path
) -> None:
    settings = {
        "run.directory": tmp_path / "runs",
        "run.versions": 2,
        "model.init": model,
        "task.prompts": ROOT / "driftlog" / "data" / "arithmetic.jsonl",
        "task.group_size": 4,
        "task.max_tokens": 12,
        "trainer.groups_per_step": 1,
        "mlflow.enabled": "false",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    config = ROOT / "configs" / "smollm2-vllm.toml"
    done = subprocess.run(
        command("up", "--config", str(config), "--run", "real", *sets),
        env=environment(), cwd=os.fspath(ROOT), capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads((tmp_path / "runs" / "real" / "summary.json").read_text())
    assert (summary["versions_trained"], summary["audit_findings"]) == (2, 0)
    costs = summary["costs"]
    expected = {"step.train", "step.checkpoint_write", "step.checkpoint_hash", "load.fetching", "load.engine_load"}
    assert expected | {"load.probe_new", "generation.group"} <= set(costs["phase_s"])
    assert costs["agreement"]["fresh_ratio_error_max"] <= costs["agreement"]["tolerance"]
    assert costs["agreement"]["probe_diff_max"] <= costs["agreement"]["tolerance"]
