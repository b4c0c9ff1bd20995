"""What the tests of the vllm engine share: engines that are started once and lent, probes, and looks at processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infra.model import load_policy
from infra.ports import Completion
from infra.wakeup import Wakeup
from producers.engines.vllm import VllmEngine
from producers.engines.vllm_core import VllmCore
from producers.engines.vllm_settings import VllmEngineSettings
from producers.engines.vllm_weights import checked_weights, positions_of, skeleton
from schemas.checkpoint import PROBE_NAME
from schemas.probe_codec import ProbeSequence, encode_probe
from tests.contract.engine_turns_contract import PROMPTS, reference_logprobs
from tests.fakes import vllm_faults
from tests.fakes.virtual_clock import VirtualClock

WAIT_S = 0.5


def settings(dtype: str = "float32", **changes: Any) -> VllmEngineSettings:
    options = {"kv_cache_gib": 0.25, "extension": vllm_faults.NAME, "start_limit_s": 300.0, "load_limit_s": 60.0}
    return VllmEngineSettings(dtype=dtype, **{**options, **changes})


class RungEngine(VllmEngine):
    """Its `poll` waits for the bell, as a runner does between two steps of a service."""

    def __init__(self, setting: VllmEngineSettings, open_core: Callable[..., Any] = VllmCore) -> None:
        self.bell = Wakeup()
        super().__init__(setting, VirtualClock(), self.bell.ring, open_core)

    def poll(self) -> Sequence[Completion]:
        if self._running:
            self.bell.wait(WAIT_S)
        return super().poll()


class Lent:
    """A running core as a fresh one: the first weights are swapped in, and `close` leaves it running."""

    def __init__(self, core: VllmCore, ring: Callable[[], None]) -> None:
        self._core = core
        self._fresh = True
        core._ring = ring
        core.call(core._in_workers("driftlog_plant", {"fault": ""}), 60.0, "planting")

    def start(self, directory: Path, label: str, positions: int) -> None:
        pass

    def serve(self, label: str, salt: str) -> None:
        if self._fresh:
            self._core.clear()
            self._core.swap()
            self._fresh = False
        self._core.serve(label, salt)

    def plant(self, fault: str) -> None:
        self._core.call(self._core._in_workers("driftlog_plant", {"fault": fault}), 60.0, "planting")

    def close(self) -> None:
        self._core.stop_all().result(60.0)
        self._core.take()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def started(directory: Path, dtype: str = "float32") -> VllmCore:
    """A core of its own on these weights. vLLM and what it imports warn of each other."""
    core = VllmCore(settings(dtype), lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = skeleton(directory)
        core.start(directory, "0", positions_of(policy))
        weights = checked_weights(policy, directory, None)
        core.stage(weights.files, weights.shapes)
        core.serve("0", "0")
    return core


def engine_on(core: VllmCore, directory: Path, version: int, dtype: str = "float32", **changes: Any) -> RungEngine:
    """An engine with a lent core, serving."""
    engine = RungEngine(settings(dtype, self_test=False, **changes), lambda _, ring: Lent(core, ring))
    engine.load(directory, version)
    engine.set_proof(10 * version)
    return engine


def plant(engine: VllmEngine, fault: str) -> None:
    core: Any = engine._core
    core.plant(fault)


def with_probe(directory: Path) -> Path:
    """Write what the trainer would: its log-probabilities of some sequences under these weights."""
    policy = load_policy(directory)
    rows = []
    for number, text in enumerate(PROMPTS):
        prompt = np.asarray(policy.encode(text), dtype=np.int32)
        chance = np.random.default_rng(number)
        answer = chance.integers(0, policy.vocabulary_size, 8).astype(np.int32)
        logprobs = reference_logprobs(policy, prompt, answer).astype(np.float32)
        rows.append(
            ProbeSequence(token_ids=np.concatenate([prompt, answer]), prompt_length=len(prompt), logprobs=logprobs)
        )
    (directory / PROBE_NAME).write_bytes(encode_probe(rows))
    return directory


def descendants(pid: int) -> Mapping[int, str]:
    """Living processes below this one -> their names. Dead ones that nobody has waited for do not count."""
    parents: dict[int, tuple[int, str, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            parents[int(entry.name)] = (int(rest[1]), name, rest[0])
    found: dict[int, str] = {}
    grown = True
    while grown:
        grown = False
        for child, (parent, name, state) in parents.items():
            if child not in found and (parent == pid or parent in found) and state != "Z":
                found[child] = name
                grown = True
    return found


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
