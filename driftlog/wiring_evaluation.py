"""Builds the evaluator from a configuration. Imports torch: only its own process imports this module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from consumers.evaluation_plan import Ask
from consumers.evaluator import EvaluatorPorts, EvaluatorService, EvaluatorSettings
from driftlog.episode_wiring import open_players
from driftlog.policies import initial_policy
from driftlog.taps import tapped
from driftlog.task_wiring import limits_of_directory
from driftlog.wiring import KeptReader, Site, open_follower, open_reader, open_store
from driftlog.wiring_engine import build_engine
from infra.clock import SystemClock
from infra.config import Config
from infra.countdown import FOUR, PAIRS
from infra.kafka_writer import KafkaEventWriter
from infra.model import load_policy
from infra.ports import Prompt
from infra.prompt_files import prompt_rows
from infra.prompt_rows import own_prompts
from infra.prompt_sources import countdown_prompts
from infra.runner import Assembly, RingingExecutor
from schemas.errors import ConfigError
from schemas.topics import TopicName
from schemas.trajectory import Sampling

_WRITER_CLOSE_S = 5.0


def build_evaluator(at: Site) -> Assembly:
    """The evaluator, with an engine of its own."""
    config, clock = at.config, SystemClock()
    evaluation = config.evaluation
    directory = initial_policy(config, at.run)
    policy = load_policy(directory, config.model.dtype)
    settings = EvaluatorSettings(
        run=at.run_id,
        seed=config.run.seed,
        every_versions=evaluation.every_versions,
        prompts=evaluation_prompts(config, policy.encode, directory),
        asks=asks_of(config, policy.eos_token_id),
        load_tries=config.generator.load_tries,
        end_limit_s=evaluation.end_limit_s,
    )
    with ExitStack() as stack:
        executor = RingingExecutor(1, at.wakeup)
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        # One group a batch: the answers of a version depend on its weights and the question, on nothing else.
        alone = build_engine(
            config,
            at.run,
            clock,
            at.wakeup.ring,
            kind=evaluation.engine,
            batching="group",
            threads=evaluation.threads,
        )
        engine, scorer = open_players(alone, config.task, directory, at.wakeup.ring, in_step=True)
        stack.callback(scorer.close)
        stack.callback(engine.close)
        writer = KafkaEventWriter(at.kafka)
        stack.callback(writer.close, _WRITER_CLOSE_S)
        ports = EvaluatorPorts(
            follower=open_follower(at, KeptReader(stack)),
            evaluations=KeptReader(stack).put(open_reader(at, TopicName.EVALUATIONS)),
            writer=tapped(writer, at.taps),
            engine=engine,
            store=open_store(config, at.run),
            reward=scorer,
            executor=executor,
            clock=clock,
        )
        return Assembly(service=EvaluatorService(settings, ports), wakeup=at.wakeup, resources=stack.pop_all())
    raise AssertionError("unreachable: ExitStack swallows nothing")


def asks_of(config: Config, end_token_id: int) -> tuple[Ask, ...]:
    """How every prompt is asked."""
    plain = Sampling(temperature=0.0, max_tokens=config.task.max_tokens, stop_token_ids=(end_token_id,))
    evaluation = config.evaluation
    asks = [Ask(sampling=plain, samples=1)] if evaluation.greedy else []
    if evaluation.samples_per_prompt:
        sampled = replace(plain, temperature=evaluation.temperature)
        asks.append(Ask(sampling=sampled, samples=evaluation.samples_per_prompt))
    return tuple(asks)


def evaluation_prompts(config: Config, encode: Callable[[str], Sequence[int]], directory: Path) -> tuple[Prompt, ...]:
    """The prompts that are asked, each once, held-out ones first, numbered by place. `directory`: of the model."""
    chosen: list[Prompt] = []
    for which in ("held_out", "trained"):
        if config.evaluation.prompts not in (which, "all"):
            continue
        if config.task.kind == "countdown":
            chosen += countdown_prompts(encode, held_out=which == "held_out", repeats={PAIRS: 1, FOUR: 1})
        else:
            chosen += _own_prompts(config, which, directory)
    return tuple(replace(prompt, index=place) for place, prompt in enumerate(chosen[: config.evaluation.max_prompts]))


def _own_prompts(config: Config, which: str, directory: Path) -> tuple[Prompt, ...]:
    file = config.evaluation.file if which == "held_out" else config.task.prompts
    if not file:
        raise ConfigError('evaluation.file names no held-out prompts; name them, or set evaluation.prompts = "trained"')
    once = config.task.model_copy(update={"mixture": {}})
    return own_prompts(prompt_rows(Path(file)), once, limits_of_directory(directory))
