"""The maths and the learner do not change by a bit without somebody saying so."""

from __future__ import annotations

import json

import pytest

from tests.unit.learner import golden_curve


def test_the_learning_curve_is_the_stored_one() -> None:
    stored = json.loads(golden_curve.FILE.read_text())
    found = golden_curve.curve()

    again = "python -m tests.unit.learner.golden_curve, and say in the changelog that the learning curve moved"
    if golden_curve.key() in stored:
        assert stored[golden_curve.key()] == found, again
    for curve in stored.values():
        for expected, step in zip(curve["steps"], found["steps"], strict=True):
            for name in golden_curve.METRICS:
                assert float.fromhex(step[name]) == pytest.approx(float.fromhex(expected[name]), abs=1e-4), again


def test_two_runs_give_the_same_bits() -> None:
    assert golden_curve.curve() == golden_curve.curve()
