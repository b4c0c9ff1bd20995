"""What a log knows of each metric, and what a checkpoint store still says of a trainer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from consumers.offline.reanalyse.known import NEVER, knowledge
from consumers.trainer.learner_settings import LearnerSettings
from driftlog.retained import retained, version_directory
from driftlog.run_reading import OpenedRun
from infra.config import Config
from infra.metrics import SECTIONS
from schemas.errors import UsageError
from tests.fakes.played_run import PlayedRun


def test_every_registered_metric_of_a_step_is_known_one_way_or_the_other() -> None:
    of_no_step = {"Evaluation", "Added for the experiment tracker"}
    assert of_no_step < {title for title, _ in SECTIONS}
    names = [metric.name for title, metrics in SECTIONS for metric in metrics if title not in of_no_step]

    unknown = [name for name in names if knowledge(name, LearnerSettings()).why_not == "not known to this command"]
    assert unknown == []


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"device": "cuda"}, 1, "summed on cuda"),
        ({}, 3, "summed over 3 processes"),
        ({}, 2, "over several processes"),
        ({"objective": replace(LearnerSettings().objective, entropy_coefficient=0.1)}, 1, "entropies are not stored"),
    ],
)
def test_what_another_machine_summed_is_not_promised(changes: dict[str, Any], ranks: int, words: str) -> None:
    assert words in knowledge("actor/pg_loss", LearnerSettings(**changes), ranks=ranks).why_not


def test_the_document_holds_the_table() -> None:
    text = Path("docs/reanalyse.md").read_text(encoding="utf-8")

    assert [why for _, why in NEVER if why not in text] == []


def test_the_trainers_fingerprint_comes_from_a_checkpoint_or_else_from_what_it_trained(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, versions=1)
    run.play(0, 1, version=0, rewards=(2.0, 0.0, 1.0, 0.5))
    at = cast("OpenedRun", SimpleNamespace(log=run.run_log, store=run.world.store, config=Config(), run=None))

    found = retained(at)
    assert found.fingerprint == run.learner.fingerprint()
    assert found.decode(run.policy.encode("1+2")) == "1+2"
    assert version_directory(at, 1) == found.directory
    with pytest.raises(UsageError, match=r"--model 7: the run has versions 0 to 1"):
        version_directory(at, 7)

    for place in list(tmp_path.rglob("manifest.json")):
        shutil.rmtree(place.parent)
    left = retained(at)
    assert left.fingerprint == {"tokenizer_digest": run.policy.tokenizer_digest}
    assert "no checkpoint is left" in left.notes[0]
    with pytest.raises(UsageError, match=r"no checkpoint is left whose tokenizer could decode"):
        left.decode([1])
