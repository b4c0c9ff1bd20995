"""Bugs planted in the evaluator: what is asked twice, what is forgotten, what is told too early.

A function here takes a MonkeyPatch; it is called anew for every seed, and undone before the log is judged.
"""

from __future__ import annotations

from typing import Any

import pytest

from consumers import evaluation_plan, evaluator

Patch = pytest.MonkeyPatch


def a_restarted_evaluator_does_not_read_what_it_wrote(patch: Patch) -> None:
    """It knows only what it has done itself."""

    def pass_over(self: Any) -> bool:
        return bool(self._p.evaluations.poll(200))

    patch.setattr(evaluator.EvaluatorService, "_read_evaluations", pass_over)


def the_last_version_is_evaluated_only_in_its_turn(patch: Patch) -> None:
    """The end of the run adds no version."""

    def in_turn(fold: Any, every_versions: int) -> tuple[int, ...]:
        live = [number for number, state in fold.versions.items() if state.activated_at_offset is not None]
        return tuple(live[::every_versions])

    patch.setattr(evaluation_plan, "wanted_versions", in_turn)


def answers_are_written_as_they_come(patch: Patch) -> None:
    """The record is sent when the first groups are complete."""
    answer = evaluator.EvaluatorService._answer

    def early(self: Any, answering: Any) -> None:
        answer(self, answering)
        if self._work is answering and answering.rows:
            self._p.engine.close()  # the other questions are dropped
            rows = tuple(row for group in answering.rows for row in group)
            self._work = evaluator._Writing(version=answering.version, rows=rows)

    patch.setattr(evaluator.EvaluatorService, "_answer", early)
