"""What `driftlog init` finds out about a model, prompts and a reward, and the configuration it writes of it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from driftlog.policies import PRESET_NAMES, check_initial_policy
from driftlog.task_wiring import limits_of_directory, open_scorer
from infra.config import Config, parse_config
from infra.ports import Completion, Prompt
from infra.prompt_files import prompt_rows
from infra.prompt_rows import ModelLimits, own_prompts
from schemas.errors import ConfigError
from schemas.ids import GroupKey, RunId, group_id
from schemas.trajectory import PromptRequest, Sampling

LONGEST_ANSWER_TOKENS = 256
"""unless asked for: long enough for short reasoning, short enough for a first try"""
EXAMPLE_LIMIT_S = 60.0
"""over the reward's own limits, which end it much sooner"""

_TEMPLATE = """\
# Made by `driftlog init`. Every key, its unit and its default: docs/configuration.md

[run]
name = {run}
versions = 100            # training steps; run the same name with more of them to go on

[model]
init = {model}
dtype = "float32"         # or "bfloat16"

[task]
kind = "prompts"
prompts = {prompts}
{column}reward = {reward}
# Several rewards, added up by weight and logged by name, in the place of `reward`:
# rewards = [
#   {{ name = {reward}, weight = 1.0 }},
#   {{ name = "soft-overlong", weight = 0.5, arguments = {{ buffer_tokens = {buffer} }} }},
# ]
reward_timeout_s = 10.0   # longest call; a call that takes longer is a failed reward, never a zero
group_size = 8            # answers of one prompt
max_tokens = {max_tokens}
temperature = 1.0

[trainer]
groups_per_step = 8       # prompts of one training step
max_lag = 2               # no token older than this many versions is trained
learning_rate = {learning_rate}
group_timeout_s = 600.0   # a group that is not in by then is given up and asked again

[generator]
workers = 1               # generator processes on this machine
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTask:
    """What the user brings."""

    model: str
    prompts: str
    reward: str
    prompt_column: str = ""
    max_tokens: int | None = None
    run: str = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTask:
    """What was found."""

    prompts: int
    longest_prompt_tokens: int
    context_tokens: int | None
    max_tokens: int
    reward_function: str
    example_text: str
    example_reward: float

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def words(self) -> list[str]:
        """For a person."""
        context = "states no limit" if self.context_tokens is None else f"allows {self.context_tokens} tokens"
        found = f"{self.prompts} prompts, the longest of {self.longest_prompt_tokens} tokens; the model {context}"
        return [
            f"{found}; answers of up to {self.max_tokens}",
            f"{self.reward_function} gives {self.example_reward:g} for the answer {self.example_text[:60]!r}",
        ]


def checked_task(own: OwnTask) -> CheckedTask:
    """Everything that can be wrong is looked at. UsageError of some kind says what is."""
    config = _config(own, 1)
    check_initial_policy(config)
    with _limits(config) as limits:
        prompts = own_prompts(prompt_rows(Path(own.prompts)), config.task, limits)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        room = LONGEST_ANSWER_TOKENS if limits.context_tokens is None else limits.context_tokens - longest
        fitting = min(room, LONGEST_ANSWER_TOKENS)
        config = _config(own, fitting if own.max_tokens is None else own.max_tokens)
        if config.task.max_tokens > room and limits.context_tokens is not None:
            raise ConfigError(
                f"--max-tokens {config.task.max_tokens}: the longest prompt has {longest} tokens and the model allows "
                f"{limits.context_tokens}: at most {room}"
            )
        text = next(iter(prompts[0].reference.values()), "")
        reward_function, value = _example(config, prompts[0], text, limits)
    return CheckedTask(
        prompts=len(prompts),
        longest_prompt_tokens=longest,
        context_tokens=limits.context_tokens,
        max_tokens=config.task.max_tokens,
        reward_function=reward_function,
        example_text=text,
        example_reward=value,
    )


def config_text(own: OwnTask, max_tokens: int) -> str:
    """The file."""
    return _TEMPLATE.format(
        run=json.dumps(own.run),
        model=json.dumps(own.model),
        prompts=json.dumps(own.prompts),
        column=f"prompt_column = {json.dumps(own.prompt_column)}\n" if own.prompt_column else "",
        reward=json.dumps(own.reward),
        buffer=max(1, max_tokens // 4),
        max_tokens=max_tokens,
        learning_rate="1e-3" if own.model in PRESET_NAMES else "1e-6",
    )


def _config(own: OwnTask, max_tokens: int) -> Config:
    return parse_config(tomllib.loads(config_text(own, max_tokens)), "driftlog init")


@contextmanager
def _limits(config: Config) -> Iterator[ModelLimits]:
    """Of the model directory; a preset is built for it, without its warm start."""
    if config.model.init not in PRESET_NAMES:
        yield limits_of_directory(Path(config.model.init))
        return
    from infra.model import save_weights
    from infra.model_presets import build_policy

    with TemporaryDirectory() as scratch:
        save_weights(build_policy(config.model.init, config.run.seed), Path(scratch))
        yield limits_of_directory(Path(scratch))


def _example(config: Config, prompt: Prompt, text: str, limits: ModelLimits) -> tuple[str, float]:
    """Score the reference answer of the first prompt; the reward must say something of it."""
    scorer = open_scorer(config.task)
    try:
        request, completion = _asked(config, prompt), _answered(prompt, text, limits)
        (reward,) = scorer.submit(request, [completion]).result(config.task.reward_timeout_s + EXAMPLE_LIMIT_S)
        if reward.value is None:
            raise ConfigError(
                f"reward function {config.task.reward!r} fails on an example (prompt {prompt.prompt_id}, answer "
                f"{text[:60]!r}, references {sorted(prompt.reference)}): {reward.error}"
            )
        return scorer.name, reward.value
    finally:
        scorer.close()


def _asked(config: Config, prompt: Prompt) -> PromptRequest:
    return PromptRequest(
        group_id=group_id(GroupKey(run=RunId(config.run.name), prompt=prompt.index, epoch=0, attempt=0)),
        request_position=0,
        prompt_id=prompt.prompt_id,
        task=prompt.task,
        epoch=0,
        attempt=0,
        group_size=1,
        prompt_token_ids=prompt.token_ids,
        prompt_text=prompt.text,
        reference=dict(prompt.reference),
        sampling=Sampling(max_tokens=config.task.max_tokens),
        intended_step=0,
        min_version=0,
        fallback_version=0,
        issued_at_us=0,
    )


def _answered(prompt: Prompt, text: str, limits: ModelLimits) -> Completion:
    try:
        ids = list(limits.encode(text))
    # A reference need not be something the model can say; the reward sees its text all the same.
    except Exception:  # noqa: BLE001
        ids = []
    token_ids = np.asarray(ids or [0], dtype=np.int32)
    return Completion(
        group_id="example",
        index_in_group=0,
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        segments=(),
        finish_reason="stop",
        text=text,
        started_at_us=0,
        finished_at_us=0,
    )
