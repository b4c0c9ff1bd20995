"""A generator whose engine computes by itself sleeps until it is rung for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.ports import Completion
from tests.fakes.tiny_policy import TinyEngine
from tests.unit.generator.generator_rig import GeneratorRig


class AloneEngine(TinyEngine):
    """Nothing is ready until it is let go."""

    ready = False

    def computes_alone(self) -> bool:
        return True

    def poll(self) -> Sequence[Completion]:
        return super().poll() if self.ready else []


@pytest.mark.parametrize("alone", [True, False])
def test_a_step_without_news_from_such_an_engine_is_no_work(tmp_path: Path, alone: bool) -> None:
    rig = GeneratorRig(tmp_path)
    engine = rig.engine = AloneEngine(rig.clock)
    engine.computes_alone = lambda: alone  # type: ignore[method-assign]
    rig.service = rig.build()
    rig.serving()
    rig.ask(0)
    rig.until(engine.busy)
    rig.step(3)

    assert rig.service.step() is not alone
    engine.ready = True
    assert rig.until(rig.groups)
