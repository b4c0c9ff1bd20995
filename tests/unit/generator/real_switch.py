"""Two versions that a real learner made, in a real store, and a real engine that is to switch from one to the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import numpy.typing as npt
import torch

from infra.checkpoint_store import FsspecCheckpointStore
from infra.ports import SavedCheckpoint
from producers.engines.hf import HfEngine, HfEngineSettings
from producers.engines.hf_batching import CachedContext
from producers.weights import WeightsKeeper, WeightsSettings
from schemas import policy_events as ev
from schemas.checkpoint import PROBE_NAME, Manifest
from schemas.probe_codec import decode_probe
from tests.fakes.inline_executor import InlineExecutor
from tests.fakes.log_script import G0, PolicyScript
from tests.fakes.policy_learners import learner, made_batch
from tests.fakes.virtual_clock import VirtualClock
from tests.unit.generator.keeper_rig import Sent

RUN = "demo"
TOLERANCE = 1e-4


@functools.cache
def versions(learning_rate: float) -> tuple[Path, tuple[SavedCheckpoint, ...]]:
    """A store with versions 0 and 1, one training step apart (made once a process; never write into it)."""
    root = Path(mkdtemp(prefix="real-switch-"))
    store = FsspecCheckpointStore(str(root), RUN, fsync=False)
    made = learner(warmup_steps=0, learning_rate=learning_rate)
    saved = [_save(store, made, "a0")]
    made.train(made_batch())
    return root, (*saved, _save(store, made, "a1"))


def _save(store: FsspecCheckpointStore, made: object, attempt: str) -> SavedCheckpoint:
    fields = made.manifest_fields()  # type: ignore[attr-defined]
    manifest = Manifest(
        run=RUN, attempt_id=attempt, parent=None, has_state=True, code_revision="r", config_digest="c", **fields
    )
    return store.save(attempt, made.save, manifest)  # type: ignore[attr-defined]


def rows_of_probe(root: Path, version: int) -> list[list[int]]:
    """Token sequences of a version's probe."""
    return [s.token_ids.tolist() for s in decode_probe((root / RUN / f"a{version}" / PROBE_NAME).read_bytes())]


class CachingEngine(HfEngine):
    """Keeps keys and values of whole blocks of its prompts beyond a request, and may forget to empty that cache."""

    def __init__(self, *, empties_cache: bool) -> None:
        super().__init__(HfEngineSettings(batching="mixed", threads=1), VirtualClock())
        self._empties_cache = empties_cache
        self._blocks: dict[tuple[int, ...], CachedContext] = {}
        self.hits = 0

    def load(self, directory: Path, version: int) -> None:
        super().load(directory, version)
        if self._empties_cache:
            self._blocks.clear()

    def prefix_block(self) -> int:
        return 4

    @torch.inference_mode()
    def generate_greedily(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        return [self._answer(list(prompt), tokens) for prompt in prompts]

    def _answer(self, prompt: list[int], count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        assert self._policy is not None
        cached = (len(prompt) - 1) // self.prefix_block() * self.prefix_block()
        key = tuple(prompt[:cached])
        self.hits += key in self._blocks
        if key not in self._blocks:
            self._blocks[key] = CachedContext(self._policy.model)
            self._blocks[key].prefill([key])
        context, feed = self._blocks[key], prompt[cached:]
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(count):
            logprobs_V = context.extend(torch.tensor([feed]))[0, -1].log_softmax(-1)
            tokens.append(int(logprobs_V.argmax()))
            logprobs.append(float(logprobs_V.max()))
            feed = tokens[-1:]
        context._cache.crop(-(len(prompt) - cached + count - 1))  # what this request added
        context._position_B = torch.tensor([cached])
        return np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32)


class RealRig:
    """g0 holds version 0 proven; `switch` asks it for version 1."""

    def __init__(self, learning_rate: float, engine: HfEngine | None = None, *, always: bool = False) -> None:
        self.root, self._saved = versions(learning_rate)
        self.engine = engine or HfEngine(HfEngineSettings(batching="mixed", threads=1), VirtualClock())
        self.store = FsspecCheckpointStore(str(self.root), RUN, fsync=False)
        self.script = PolicyScript()
        self.sent: list[ev.AnyPolicyEvent] = []
        self.after_fetch: Callable[[Path], Path] = lambda directory: directory
        settings = WeightsSettings(
            run=RUN, drain_timeout_s=2.0, fetch_timeout_s=60.0, load_tries=1, retry_wait_s=0.5,
            probe_tolerance=TOLERANCE, always_probe_generated=always,
        )  # fmt: skip
        self.keeper = WeightsKeeper(
            settings, engine=self.engine, store=self, executor=InlineExecutor(),  # type: ignore[arg-type]
            clock=VirtualClock(), send=self._send,
        )  # fmt: skip
        self.script.started()
        self.script.joined(G0)
        self._publish(0)
        self.script.switched("s0", 0, [G0])
        self._step()
        self.script.activated("s0", 0, [self.script.last])
        assert self.keeper.held == 0
        self.sent.clear()

    def fetch(self, manifest_uri: str, manifest_sha256: str) -> tuple[Path, Manifest]:
        """As the store's: every byte is verified; what the test does to the files comes after that."""
        directory, manifest = self.store.fetch(manifest_uri, manifest_sha256)
        return self.after_fetch(directory), manifest

    def switch(self) -> ev.AnyPolicyEvent:
        """Ask for version 1; the worker's one answer."""
        self._publish(1)
        self.script.switched("s1", 1, [G0])
        self._step()
        [answer] = self.sent
        return answer

    def distance(self) -> float:
        """max |log-probability| between version 0 and version 1 on the probe of version 1."""
        probe = decode_probe((self.root / RUN / "a1" / PROBE_NAME).read_bytes())
        engine = HfEngine(HfEngineSettings(batching="mixed", threads=1), VirtualClock())
        engine.load(self.root / RUN / "a0", 0)
        scores = engine.score([s.token_ids.tolist() for s in probe], [s.prompt_length for s in probe])
        return max(float(np.abs(a - s.logprobs).max()) for a, s in zip(scores, probe, strict=True))

    def _publish(self, version: int) -> None:
        saved = self._saved[version]
        event = ev.VersionPublished(
            run=RUN, at_us=0, version=version, parent=version - 1 if version else None, depth=version,
            manifest_uri=saved.manifest_uri, manifest_sha256=saved.manifest_sha256, bytes=saved.bytes,
            optimizer_step=version, oldest_open_request=0,
        )  # fmt: skip
        assert self.script.tell(event) is None

    def _send(self, event: ev.AnyPolicyEvent) -> Sent:
        self.sent.append(event)
        self.script.tell(event)
        return Sent(self.script.last)

    def _step(self) -> None:
        for _ in range(8):
            self.keeper.step(self.script.fold, G0)
