"""Swaps weights inside vLLM's worker processes: the class that vLLM mixes into its worker.

Guarantees: files are opened and every name and shape is compared before one tensor of the model is touched; a
tied output head is packed anew, which a reload alone leaves as it was. No attribute here exists on the worker.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


class SwapExtension:
    """Methods that the engine calls in every worker by name. What they need of vLLM is on `self`."""

    def driftlog_stage(self, paths: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> int:
        """Open the files and look for every tensor. Raises ValueError before anything was touched.

        Files are mapped into memory: a published directory is never written again."""
        where: dict[str, str] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        if name in shapes:
                            found = list(file.get_slice(name).get_shape())
                            if found != list(shapes[name]):
                                raise ValueError(f"{path}: tensor {name} is {found}, expected {list(shapes[name])}")
                            where[name] = path
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
        # vLLM only warns about a tensor that is not there, and leaves it in an undefined state.
        missing = sorted(set(shapes) - set(where))
        if missing:
            raise ValueError(f"{Path(paths[0]).parent}: tensor {missing[0]} is missing ({len(missing)} in all)")
        self.driftlog_staged = where
        return len(where)

    def driftlog_swap(self, rotated: Sequence[str]) -> int:
        """Replace the model's weights by the staged ones. `rotated`: tensors whose rows are moved down by one (the
        self-test). A failure in here leaves weights that nobody may sample from."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            UnquantizedEmbeddingMethod,
            VocabParallelEmbedding,
        )

        worker: Any = self
        worker.reload_weights(weights_iterator=self.driftlog_tensors(self.driftlog_staged, rotated))
        # A tied head has no tensor in the files: its packed copy of the old embedding would stay.
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            for module in worker.model_runner.get_model().modules():
                if isinstance(module, VocabParallelEmbedding) and isinstance(
                    module.quant_method, UnquantizedEmbeddingMethod
                ):
                    module.quant_method.process_weights_after_loading(module)
        return len(self.driftlog_staged)

    def driftlog_tensors(self, where: Mapping[str, str], rotated: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """One tensor after another, so that no second copy of the model is held."""
        for path in sorted(set(where.values())):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in sorted(name for name, place in where.items() if place == path):
                    tensor = file.get_tensor(name)
                    yield name, torch.roll(tensor, 1, 0) if name in rotated else tensor

    def driftlog_die_with(self, service_pid: int) -> bool:
        """End this process and vLLM's core, its parent, when the service is gone, however it went."""
        core = os.getppid() if os.getppid() != service_pid else 0
        watched = os.pidfd_open(service_pid)

        def wait() -> None:
            select.select([watched], [], [])
            if core and os.getppid() == core:
                os.kill(core, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="driftlog-service", daemon=True).start()
        return True
