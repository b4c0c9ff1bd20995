"""A swap extension for vLLM's workers that goes wrong on demand. Imported in those processes by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from producers.engines.vllm_swap import SwapExtension

NAME = "tests.fakes.vllm_faults.FaultySwap"


class FaultySwap(SwapExtension):
    """`driftlog_plant` chooses what goes wrong from then on; "" is nothing."""

    def driftlog_plant(self, fault: str) -> None:
        self.driftlog_fault = fault

    def driftlog_stage(self, paths: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> int:
        if getattr(self, "driftlog_fault", "") == "unreadable":
            raise ValueError(f"{paths[0]} is not a complete safetensors file: planted")
        self.driftlog_before = getattr(self, "driftlog_staged", {})
        return super().driftlog_stage(paths, shapes)

    def driftlog_swap(self, rotated: Sequence[str]) -> int:
        if getattr(self, "driftlog_fault", "") == "bare reload":
            worker: Any = self
            worker.reload_weights(weights_iterator=self.driftlog_tensors(self.driftlog_staged, rotated))
            return 0
        return super().driftlog_swap(rotated)

    def driftlog_tensors(self, where: Mapping[str, str], rotated: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        fault = getattr(self, "driftlog_fault", "")
        old = dict(super().driftlog_tensors(self.driftlog_before, ())) if fault == "half switch" else {}
        for number, (name, tensor) in enumerate(super().driftlog_tensors(where, rotated)):
            if fault == "dies half way" and number == len(where) // 2:
                raise OSError("input/output error (planted)")
            yield name, old[name] if old and name.startswith("model.layers.1.") else tensor
