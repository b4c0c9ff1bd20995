"""The generator service against its bare engine, on the same prompts in one run: what the log costs generation.

    python -m benchmarks.bench_generator --model DIRECTORY [--engines vllm hf] [--groups 4] [--rounds 3]

Real parts throughout: an embedded Kafka broker, the trainer's first transaction, the coordinator, the generator as
`driftlog generate` builds it with its Kafka writer and reward. Both sides use one engine process and sample the same
tokens (same seeds, no stop token): the service from requests that lie in the log to trajectories that can be read from
it, the bare engine from the same requests in memory to their last token. Rounds alternate. A round's clock starts when
the requests have reached the worker. The last line is `RESULT {json}`. Compare figures side by side only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from driftlog.policies import initial_policy
from driftlog.run_directory import RunDirectory
from driftlog.services import IDLE_WAIT_S
from driftlog.task_wiring import training_prompts
from driftlog.wiring import Site, build_coordinator, build_generator, open_reader, site
from driftlog.wiring_trainer import build_trainer
from infra import local_broker, logs
from infra.clock import SystemClock
from infra.config import load_config
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_writer import KafkaEventWriter
from infra.model import load_policy
from infra.ports import EngineRequest, Message
from infra.runner import run_service
from infra.wakeup import Wakeup
from producers.engines.vllm_core import Ask
from producers.engines.vllm_member import members_of
from schemas.ids import GroupKey, group_id
from schemas.prompt_codec import encode_request, request_headers
from schemas.topics import TOPICS, TopicName, topic
from schemas.trajectory import PromptRequest, Sampling

LIMIT_S = 300.0
SETTLE_S = 2.0
"""requests lie in the worker's queue after that: a reader thread fetches them"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run of the bench."""

    model: str
    dtype: str
    groups: int
    group_size: int
    tokens: int
    rounds: int
    threads: int


def config_words(kind: str, folder: Path, options: Options) -> list[str]:
    """The configuration of one stage, as `--set` words. Nothing is trained: the trainer stops after its first words."""
    return [
        f"run.name=bench-{kind}", f'run.directory="{folder / "runs"}"', f'model.init="{options.model}"',
        f"model.dtype={options.dtype}", "task.kind=prompts", "task.prompts=driftlog/data/arithmetic.jsonl",
        "task.reward=length", f"task.group_size={options.group_size}", f"task.max_tokens={options.tokens}",
        "trainer.groups_per_step=1", "trainer.max_lag=0", "trainer.min_group=2", "trainer.group_timeout_s=3600",
        # What a real model's logits are rounded by in bfloat16: docs/vllm.md
        f"generator.probe_tolerance={1e-3 if options.dtype == 'float32' else 0.5}",
        f"generator.engine={kind}", f"generator.threads={options.threads}",
        f"generator.max_groups_in_flight={options.groups}", "vllm.max_model_len=256",
        "coordinator.lease_s=900", "coordinator.switch_deadline_s=900", "mlflow.enabled=false",
    ]  # fmt: skip


class Stage:
    """A run with one proven generator that nothing else asks for anything."""

    def __init__(self, kind: str, folder: Path, bootstrap: str, options: Options, stack: ExitStack) -> None:
        self._options = options
        config = load_config(None, config_words(kind, folder, options))
        run = RunDirectory(Path(config.run.directory), config.run.name)
        run.path.mkdir(parents=True)
        self.at = site(config, run, bootstrap, Wakeup())
        admin = KafkaLogAdmin(self.at.kafka)
        admin.create_topics(config.run.name)
        admin.close()
        self._first_transaction()
        self._stop = threading.Event()
        self._coordinate(site(config, run, bootstrap, Wakeup()), stack)
        self._policy = load_policy(initial_policy(config, run))
        self._prompts = training_prompts(config, self._policy)
        self._writer = KafkaEventWriter(self.at.kafka)
        stack.callback(self._writer.close, 5.0)
        self._reader = open_reader(self.at, TopicName.TRAJECTORIES)
        stack.callback(self._reader.close)
        assembly = build_generator(self.at, "g0")
        stack.callback(assembly.close)
        self._service: Any = assembly.service
        stack.callback(self._service.close)
        self.engine: Any = self._service._p.engine
        self._position = 1000
        # The request of the trainer's first transaction: the worker has joined, switched, and is warm.
        self._until(lambda: len(self._reader.poll(100)) > 0)

    def requests(self, round_: int) -> list[PromptRequest]:
        """The prompts of the bench; only their names differ from round to round."""
        sampling = Sampling(temperature=1.0, max_tokens=self._options.tokens)
        found = []
        for place in range(self._options.groups):
            prompt, _ = self._prompts.at(place)
            self._position += 1
            key = GroupKey(run=self.at.run_id, prompt=prompt.index, epoch=0, attempt=round_ + 1)
            found.append(
                PromptRequest(
                    group_id=group_id(key),
                    request_position=self._position,
                    prompt_id=prompt.prompt_id,
                    task=prompt.task,
                    epoch=0,
                    attempt=round_ + 1,
                    group_size=self._options.group_size,
                    prompt_token_ids=prompt.token_ids,
                    reference=dict(prompt.reference),
                    sampling=sampling,
                    intended_step=1,
                    min_version=0,
                    fallback_version=0,
                    issued_at_us=0,
                )
            )
        return found

    def service_seconds(self, requests: Sequence[PromptRequest]) -> float:
        """From requests in the worker's queue to trajectories that can be read from the log."""
        partitions = TOPICS[TopicName.PROMPTS].partitions
        for request in requests:
            value = encode_request(request)
            self._writer.send(
                Message(
                    topic=topic(self.at.run_id, TopicName.PROMPTS),
                    key=request.group_id.encode(),
                    value=value,
                    headers=request_headers(request, value, "bench"),
                    partition=request.request_position % partitions,
                )
            ).result(10.0)
        time.sleep(SETTLE_S)
        read = 0
        begun_s = time.perf_counter()

        def all_read() -> bool:
            nonlocal read
            read += len(self._reader.poll(100))
            return read >= len(requests)

        self._until(all_read)
        return time.perf_counter() - begun_s

    def bare_seconds(self, requests: Sequence[PromptRequest], seed: int) -> float:
        """The engine alone: vLLM's AsyncLLM with the same sampling parameters, or the hf engine in a loop."""
        asked = [EngineRequest(request=request, rng_seed=seed) for request in requests]
        begun_s = time.perf_counter()
        if not self.engine.computes_alone():
            for request in asked:
                self.engine.submit(request)
            while self.engine.busy():
                self.engine.poll()
            return time.perf_counter() - begun_s
        members = [member for request in asked for member in members_of(request, 0)]
        core = self.engine._core
        core.begin([Ask(key=n, token_ids=m.context(), arguments=m.arguments()) for n, m in enumerate(members)])
        done = 0
        while done < len(members):
            self.at.wakeup.wait(1.0)
            done += len(core.take())
        return time.perf_counter() - begun_s

    def _until(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not reached():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the service did not get there within {LIMIT_S:g} s")
            if not self._service.step():
                self.at.wakeup.wait(IDLE_WAIT_S)

    def _first_transaction(self) -> None:
        """Version 0, its probe and one request, as the trainer writes them."""
        assembly = build_trainer(self.at)
        reader = open_reader(self.at, TopicName.PROMPTS)
        try:
            deadline_s = time.monotonic() + LIMIT_S
            while not reader.poll(10):
                if time.monotonic() > deadline_s:
                    raise SystemExit("the trainer wrote nothing")
                if not assembly.service.step():
                    time.sleep(0.05)
        finally:
            reader.close()
            assembly.service.close()
            assembly.close()

    def _coordinate(self, at: Site, stack: ExitStack) -> None:
        assembly = build_coordinator(at)

        def loop() -> None:
            run_service(assembly.service, wakeup=at.wakeup, stop=self._stop, idle_wait_s=0.2, clock=SystemClock())
            assembly.close()

        thread = threading.Thread(target=loop, name="coordinator", daemon=True)
        thread.start()
        stack.callback(thread.join, 30.0)
        stack.callback(self._stop.set)


def measure(kind: str, folder: Path, bootstrap: str, options: Options) -> dict[str, Any]:
    """Alternating rounds of one engine."""
    tokens = options.groups * options.group_size * options.tokens
    found: dict[str, list[float]] = {"service": [], "bare": []}
    with ExitStack() as stack:
        stage = Stage(kind, folder, bootstrap, options, stack)
        stage.bare_seconds(stage.requests(90), 0)  # warm at the size that is measured
        for round_ in range(options.rounds):
            requests = stage.requests(round_)
            # Who comes second finds warmer caches: the order alternates.
            sides = ("service", "bare") if round_ % 2 == 0 else ("bare", "service")
            for side in sides:
                seconds = stage.service_seconds(requests) if side == "service" else stage.bare_seconds(requests, 0)
                found[side].append(tokens / seconds)
                print(f"{kind} {side}: {tokens / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
        engine = dict(stage.engine.identity())
    service, bare = statistics.median(found["service"]), statistics.median(found["bare"])
    return {
        "share": round(service / bare, 4), "service_tokens_per_s": round(service, 1),
        "bare_tokens_per_s": round(bare, 1), "engine": f"{engine['engine']} {engine['engine_version']}",
        "by_round": {side: [round(value, 1) for value in values] for side, values in found.items()},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """One stage an engine, on one broker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2-135m-instruct")
    parser.add_argument("--engines", nargs="+", choices=("vllm", "hf"), default=["vllm", "hf"])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    words = vars(parser.parse_args(arguments))
    engines = words.pop("engines")
    options = Options(**words)
    options = replace(options, model=str(Path(options.model).resolve()))
    logs.configure("WARNING", False, service="bench", run="bench")
    load_before = os.getloadavg()[0]
    result: dict[str, Any] = {}
    jars = local_broker.ensure_jars(local_broker.default_cache_dir())
    with tempfile.TemporaryDirectory(prefix="bench-generator-") as name:
        folder = Path(name)
        broker = local_broker.start(folder / "broker", jars=jars, die_with_parent=True)
        try:
            for kind in engines:
                found = measure(kind, folder, broker.bootstrap_servers, options)
                result |= {f"{kind}_{key}": value for key, value in found.items()}
        finally:
            local_broker.stop(folder / "broker")
    shape = {key: value for key, value in asdict(options).items() if key != "model"}
    model = Path(options.model).name
    result |= {"bench": "generator", "model": model, **shape, "cores": os.cpu_count(), "load_before": load_before}
    print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
