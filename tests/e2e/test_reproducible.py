"""max_lag 0 with batching = group: the same seed gives the same bytes, whatever the number of workers."""

from __future__ import annotations

from pathlib import Path

from driftlog.broker_access import reading_broker
from driftlog.run_reading import opened
from schemas.checkpoint import WEIGHTS_NAME
from schemas.ledger import StepCompleted
from schemas.policy_fold import PolicyFold
from tests.e2e.driving import Site, make_site, up

ON_POLICY = ("run.versions=5", "trainer.max_lag=0", 'generator.batching="group"')


def test_two_on_policy_runs_give_the_same_final_weights_and_ratios_of_one(tmp_path: Path, kafka_jars: Path) -> None:
    weights, errors = [], []
    for folder, workers in (("a", 1), ("b", 2)):
        site = make_site(tmp_path / folder)
        done = up(site, *ON_POLICY, f"generator.workers={workers}")
        assert done.returncode == 0, done.stderr
        assert site.summary()["policy_lag_histogram"] == {"0": 5 * 4 * 4}
        sha256, found = _final_weights_and_ratio_errors(site)
        weights.append(sha256)
        errors += found

    assert weights[0] == weights[1]
    assert len(errors) == 10
    assert max(errors) <= 1e-4


def _final_weights_and_ratio_errors(site: Site) -> tuple[str, list[float]]:
    config = site.run().stored_config()
    assert config is not None
    with reading_broker(config, site.run()) as bootstrap:
        at = opened(config, site.run(), bootstrap)
        log, fold = at.log(), PolicyFold()
        for _ in log.policy(fold):
            pass
        steps = [t.control for t in log.transactions() if isinstance(t.control, StepCompleted)]
    assert fold.newest is not None
    newest = fold.versions[fold.newest].event
    _, manifest = at.store().fetch(newest.manifest_uri, newest.manifest_sha256)
    return manifest.file(WEIGHTS_NAME).sha256, [step.metrics["mismatch/fresh_ratio_error_max"] for step in steps]
