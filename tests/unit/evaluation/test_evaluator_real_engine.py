"""The evaluator on the engine that generates: answers are those of the version's weights, and the same every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from consumers.evaluation import scores_of
from consumers.evaluator import EvaluatorService
from driftlog.wiring_evaluation import asks_of, evaluation_prompts
from infra.config import parse_config
from infra.model import load_policy
from infra.rewards import ScoredAtOnce, countdown_reward
from producers.engines.hf import HfEngine, HfEngineSettings
from schemas.checkpoint import Manifest
from schemas.evaluation_codec import EvaluationRow
from tests.fakes.evaluated_run import EvaluatedRun
from tests.fakes.policy_rows import moved_directory, tiny_directory
from tests.fakes.tiny_values import manifest


def _evaluated(directory: Path, weights: dict[int, Path], *versions: int) -> dict[int, list[EvaluationRow]]:
    """The answers of these versions, evaluated one after the other by one process."""
    run, config = EvaluatedRun(directory), parse_config({"evaluation": {"max_prompts": 4}}, "test")
    policy = load_policy(tiny_directory())

    def fetch(manifest_uri: str, manifest_sha256: str) -> tuple[Path, Manifest]:
        version = int(manifest_sha256.rsplit("-", 1)[1])
        return weights[version], manifest("a", version)

    service = run.evaluator()
    settings = replace(
        service._s,
        prompts=evaluation_prompts(config, policy.encode, tiny_directory()),
        asks=asks_of(config, policy.eos_token_id),
    )
    ports = replace(
        service._p, engine=HfEngine(HfEngineSettings(batching="group", threads=1), run.clock),
        reward=ScoredAtOnce(countdown_reward()),
    )  # fmt: skip
    run.store.fetch = fetch  # type: ignore[method-assign]
    service = EvaluatorService(settings, ports)
    for version in range(max(versions) + 1):
        run.policy.live(version)
        if version in versions:
            run.rest(service)
    service.close()
    rows = [replace(row, evaluated_at_us=0) for row in run.rows()]
    return {version: [row for row in rows if row.version == version] for version in versions}


def test_a_version_is_answered_by_its_own_weights_whatever_was_loaded_before(tmp_path: Path) -> None:
    weights = {0: tiny_directory(), 1: moved_directory(tmp_path / "moved", 1, scale=0.5)}

    both, alone = _evaluated(tmp_path, weights, 0, 1), _evaluated(tmp_path, weights, 1)

    assert both[1] == alone[1]
    assert [replace(row, version=1) for row in both[0]] != both[1]
    assert len(both[1]) == 4 * (1 + 4)
    assert scores_of(both[0]).prompts == 4
    assert all(row.reward in (0.0, 1.0) and 1 <= row.completion_tokens <= 8 for row in both[0])
