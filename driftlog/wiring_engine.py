"""Builds the generation engine that the configuration names, for every process that samples.

Neither vllm nor transformers is imported before the engine's first load; torch is, by the hf engine's module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from driftlog.policies import base_directory
from driftlog.run_directory import RunDirectory
from infra.config import Config
from infra.ports import Clock, GenerationEngine


def build_engine(
    config: Config,
    run: RunDirectory,
    clock: Clock,
    ring: Callable[[], None],
    *,
    kind: Literal["hf", "vllm"],
    batching: Literal["group", "mixed"],
    threads: int,
) -> GenerationEngine:
    """An engine without weights. `ring`: wakes the service that polls it; `batching`: of hf, which vllm does its own
    way."""
    base = base_directory(config, run)
    if kind == "hf":
        from producers.engines.hf import HfEngine, HfEngineSettings

        settings = HfEngineSettings(
            batching=batching,
            max_batch_sequences=max(256, config.task.group_size),
            dtype=config.model.dtype,
            threads=threads,
            base_directory=base,
        )
        return HfEngine(settings, clock)
    from producers.engines.vllm import VllmEngine
    from producers.engines.vllm_settings import VllmEngineSettings

    section = config.vllm
    return VllmEngine(
        VllmEngineSettings(
            dtype=config.model.dtype,
            threads=threads,
            tensor_parallel=section.tensor_parallel,
            memory_fraction=section.memory_fraction,
            kv_cache_gib=section.kv_cache_gib,
            max_model_len=section.max_model_len,
            max_sequences=section.max_sequences,
            enforce_eager=section.enforce_eager,
            prefix_caching=section.prefix_caching,
            self_test=section.self_test,
            start_limit_s=section.start_limit_s,
            load_limit_s=section.load_limit_s,
            base_directory=base,
        ),
        clock,
        ring,
    )
