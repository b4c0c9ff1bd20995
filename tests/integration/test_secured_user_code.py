"""User code is not handed what the service knows of broker and tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.config_task import RewardEntry
from infra.reward_processes import ProcessScorer, RewardProcessSettings
from tests.unit.policy.test_rewards import completion, request

CODE = """
import os

def credentials(request, completion):
    return float(sum(name.startswith(("DRIFTLOG_KAFKA", "MLFLOW_TRACKING")) for name in os.environ))

def own(request, completion):
    return float(os.environ["JUDGE_KEY"])
"""


def test_user_code_sees_its_own_variables_and_none_of_our_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own_reward.py"
    path.write_text(CODE)
    for name in ("DRIFTLOG_KAFKA", "DRIFTLOG_KAFKA_SASL_PLAIN_PASSWORD", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("JUDGE_KEY", "7")
    entries = (RewardEntry(name=f"{path}:credentials"), RewardEntry(name=f"{path}:own"))

    scorer = ProcessScorer(RewardProcessSettings(entries=entries, processes=1, timeout_s=30.0))
    try:
        (found,) = scorer.submit(request(answer="x"), [completion("a")]).result(60.0)
    finally:
        scorer.close()

    assert found.value == 7.0
