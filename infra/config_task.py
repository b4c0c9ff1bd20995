"""[task] of the configuration: which prompts, how they are sampled, and what judges the completions.

Owns what can be refused without reading a file. Imports neither torch nor pyarrow.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config_section import Section

Scalar = str | bool | int | float

NEEDS_A_LIMIT = frozenset({"math"})
"""shipped rewards that some answers can keep busy for minutes: they are scored in processes, as one's own are"""

ENVIRONMENT_KEYS = ("environment", "environment_arguments", "max_turns", "observation_template")
"""settings that say nothing while task.environment is empty"""


class RewardEntry(Section):
    """One of several weighted rewards."""

    name: str
    """as task.reward"""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    arguments: dict[str, Scalar] = Field(default_factory=dict)
    """passed to the function by name"""


class EnvironmentEntry(Section):
    """Who answers the policy's turns."""

    name: str
    """as task.environment"""
    arguments: dict[str, Scalar] = Field(default_factory=dict)


class TaskSection(Section):
    """[task]"""

    kind: Literal["countdown", "prompts"] = "countdown"
    """countdown: the built-in game; prompts: your own, from task.prompts (docs/own-task.md)"""
    prompts: str = ""
    """a .jsonl or .parquet file, or the folder of a Hugging Face dataset split"""
    prompts_sha256: str = ""
    """digest of the prompts' bytes, filled in when a run begins: group ids are made of prompt indices, so a run goes \
on only with the same ones"""
    prompt_column: str = ""
    """text, chat messages or token ids; empty: the first there is of prompt, messages, prompt_token_ids"""
    reference_columns: list[str] | None = None
    """columns the reward gets, as text; unset: all others"""
    mixture: dict[str, int] = Field(default_factory=dict)
    """task -> how often its prompts stand in one epoch (tasks not named: once; 0: left out)"""
    reward: str = "countdown"
    """a shipped reward, package.module:function, or path/to/file.py:function"""
    rewards: list[RewardEntry] = Field(default_factory=list)
    """several rewards, added up by weight, in the place of task.reward"""
    environment: str = ""
    """several turns: calculator, guess, package.module:Class or path/to/file.py:Class (docs/multi-turn.md); it \
rewards in the place of task.reward; empty: one turn"""
    environment_arguments: dict[str, Scalar] = Field(default_factory=dict)
    """passed to the environment by name"""
    max_turns: int = Field(default=4, ge=1)
    """with an environment: an episode that is not done after so many turns ends there"""
    observation_template: str = ""
    """how an observation is put between two turns: text with {observation} in it; empty: as a user's message of the \
tokenizer's chat template, and as it is where there is none"""
    reward_processes: int | None = Field(default=None, ge=1)
    """processes in which each generator scores, or asks the environment; unset: none for what is shipped, 1 for \
your own"""
    reward_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """longest call of a reward: one completion, or a whole group where the function is batched or async; of an \
environment: one episode so far"""
    group_size: int = Field(default=16, ge=2)
    """completions of one prompt; a group baseline needs at least 2"""
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=8, ge=1)
    """longest completion, tokens; with an environment all turns of an episode with all observations between them"""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "prompts" and not self.prompts:
            raise ValueError('kind = "prompts" needs task.prompts: name a .jsonl or .parquet file, or a dataset folder')
        if self.kind == "countdown" and self.prompts:
            raise ValueError('task.prompts is set, but kind = "countdown" brings its own: write kind = "prompts"')
        if self.kind == "countdown" and self.mixture:
            raise ValueError('task.mixture goes with kind = "prompts"')
        if min(self.mixture.values(), default=0) < 0:
            raise ValueError("task.mixture: how often a task stands in an epoch is 0 or more")
        if self.rewards and "reward" in self.model_fields_set and self.reward != "countdown":
            raise ValueError("task.reward and task.rewards are both set: put everything into task.rewards")
        self._check_environment()
        names = [entry.name for entry in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError("task.rewards names one reward twice: their parts are logged by name")
        return self

    def reward_entries(self) -> list[RewardEntry]:
        """What judges: task.rewards, or task.reward alone."""
        return self.rewards or [RewardEntry(name=self.reward)]

    def _check_environment(self) -> None:
        if not self.environment:
            if self.environment_arguments or self.observation_template:
                raise ValueError("task.environment_arguments and task.observation_template need a task.environment")
            return
        if self.rewards or ("reward" in self.model_fields_set and self.reward != "countdown"):
            raise ValueError(
                "task.environment rewards its episodes itself: leave task.reward and task.rewards out, and let the "
                "environment add up what counts"
            )
        if self.observation_template and self.observation_template.count("{observation}") != 1:
            raise ValueError("task.observation_template: write {observation} once, where the text goes")

    def environment_entry(self) -> EnvironmentEntry | None:
        """Who answers; None: episodes have one turn."""
        if not self.environment:
            return None
        return EnvironmentEntry(name=self.environment, arguments=self.environment_arguments)

    @property
    def worker_processes(self) -> int:
        """Processes a generator scores in; 0: in its own."""
        if self.environment:
            return self.reward_processes or int(":" in self.environment)
        own = any(":" in entry.name or entry.name in NEEDS_A_LIMIT for entry in self.reward_entries())
        return self.reward_processes or int(own)
