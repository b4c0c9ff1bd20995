"""What must hold of `evaluations` after a simulated run: whole versions, each once, and the last one among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from schemas.evaluation_codec import EvaluationRow, decode_evaluation
from schemas.topics import TopicName
from tests.sim.reading import read, records
from tests.sim.services import EVALUATION_ASKS, EVALUATION_PROMPTS
from tests.sim.world import World


def check_evaluations(world: World) -> list[str]:
    """Every violation, in words."""
    found = [decode_evaluation(record.value, record.headers) for record in records(world, TopicName.EVALUATIONS)]
    if not world.plan.evaluate:
        return [f"evaluation: {len(found)} records without an evaluator"] if found else []
    fold = read(world).fold
    times = Counter(row.version for rows in found for row in rows[:1])
    problems = [f"evaluation: version {version} is there {n} times" for version, n in times.items() if n != 1]
    for rows in found:
        problems += _rows(rows)
    # One that was published and never live is evaluated where it was the newest at an end of the run.
    problems += [f"evaluation: version {v} was never published" for v in times if v not in fold.versions]
    # A branch opens the run again; an evaluator that read the end before that has left, as it should.
    if world.plan.branch is None and fold.newest not in times:
        problems.append(f"evaluation: the last version {fold.newest} was not evaluated")
    return problems


def _rows(rows: Sequence[EvaluationRow]) -> list[str]:
    asked = Counter(
        (f"t{prompt}", ask.sampling.temperature, sample)
        for prompt in range(EVALUATION_PROMPTS)
        for ask in EVALUATION_ASKS
        for sample in range(ask.samples)
    )
    there = Counter((row.prompt_id, row.temperature, row.sample) for row in rows)
    return [] if there == asked else [f"evaluation: {sorted(there.items())} answers, asked were {sorted(asked)}"]
