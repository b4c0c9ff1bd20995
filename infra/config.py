"""The configuration of a run: one TOML file, every field with unit, default and one line.

Unknown keys are errors that name the nearest known key; combinations that cannot work are refused here, before
anything starts. Imports neither torch nor mlflow nor kafka.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from infra.config_evaluation import EvaluationSection, evaluation_problems
from infra.config_generator import GeneratorSection, generator_problems
from infra.config_lora import LoraSection, lora_problems
from infra.config_metrics import MetricsSection
from infra.config_section import Section
from infra.config_task import ENVIRONMENT_KEYS, TaskSection
from infra.config_trainer import (
    AlarmsSection,
    ObjectiveSection,
    ReferenceSection,
    ReplaySection,
    TrainerSection,
    trainer_problems,
)
from infra.config_vllm import VllmSection, vllm_problems
from schemas.errors import ConfigError
from schemas.ids import run_id

SECRET_KEYS = frozenset({"sasl_plain_password", "ssl_password"})
"""of kafka.security"""
# What may change when a run is resumed: everything else is a learning setting and is refused by key.
OPERATIONAL_SECTIONS = frozenset({"kafka", "mlflow", "view", "alarms", "evaluation", "vllm", "metrics"})
OPERATIONAL_KEYS = frozenset(
    {
        "run.versions",
        "run.directory",
        # Where the prompts lie; what they are is task.prompts_sha256.
        "task.prompts",
        "task.reward_processes",
        "task.reward_timeout_s",
        "generator.workers",
        "generator.heartbeat_s",
        "generator.threads",
        "generator.max_groups_in_flight",
        "generator.drain_timeout_s",
        "generator.poison_after",
        "generator.keep_text",
        "coordinator.lease_s",
        "coordinator.switch_deadline_s",
        "coordinator.failed_switches_in_row",
        "coordinator.min_workers",
        "checkpoints.root",
        "checkpoints.keep",
        "checkpoints.state_every",
        "checkpoints.garbage_grace_s",
        "trainer.group_timeout_s",
        "trainer.overlap_publication",
        "trainer.threads",
        "trainer.rank_timeout_s",
    }
)


class RunSection(Section):
    """[run]"""

    name: str = "demo"
    """owns the topics `<name>.*`; lower-case letters, digits and '-'"""
    seed: int = 0
    versions: int = Field(default=250, ge=1)
    """training steps, each publishing one version"""
    directory: str = "runs"
    """where run data, logs and the embedded broker's data lie"""


class ModelSection(Section):
    """[model]"""

    init: str = "countdown-tiny"
    """a preset of `driftlog init-policy`, or the directory of a Hugging Face model"""
    dtype: Literal["float32", "bfloat16"] = "float32"


class CoordinatorSection(Section):
    """[coordinator]"""

    mode: Literal["barrier", "rolling"] = "barrier"
    """barrier: a worker samples under a version only after VersionActivated; rolling: right after its own proof"""
    lease_s: float = Field(default=15.0, gt=0)
    """a worker without a heartbeat for this long is expired"""
    switch_deadline_s: float = Field(default=90.0, gt=0)
    """a living worker that has answered neither way by then is taken out of the switch"""
    failed_switches_in_row: int = Field(default=5, ge=1)
    """that many stop the run"""
    min_workers: int = Field(default=1, ge=1)
    """joined workers the very first switch waits for, a few seconds at most"""


class CheckpointsSection(Section):
    """[checkpoints]"""

    root: str = ""
    """store root, a path or an fsspec address; empty: <run directory>/checkpoints"""
    keep: int | Literal["all"] = "all"
    """versions whose weights are kept"""
    state_every: int = Field(default=1, ge=1)
    """optimizer state is saved with every K-th version; a restart from another one goes back to the last that has it"""
    garbage_grace_s: float = Field(default=3600.0, gt=0)
    """directories that no version names (a crash left them) are removed this long after they were last written"""


class KafkaSection(Section):
    """[kafka]; unset bootstrap_servers: an embedded broker is started"""

    bootstrap_servers: str = ""
    """HOST:PORT[,HOST:PORT]; the environment variable DRIFTLOG_KAFKA overrides it"""
    port: int | None = Field(default=None, ge=1, le=65535)
    """of the embedded broker; unset: a free one"""
    request_timeout_s: float = Field(default=10.0, gt=0)
    delivery_timeout_s: float = Field(default=60.0, gt=0)
    transaction_timeout_s: float = Field(default=10.0, gt=0)
    session_timeout_s: float = Field(default=6.0, ge=6.0)
    """of the prompts consumer group; brokers allow no less than 6"""
    in_flight_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """bytes a writer may have sent and not acknowledged"""
    reader_queue_records: int = Field(default=500, ge=1)
    reader_queue_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """of a reader's records that its service has not taken; the trainer's hold their decoded rows too, as much again"""
    security: dict[str, str] = Field(default_factory=dict)
    """passed to the Kafka client as they are (security_protocol, sasl_mechanism, ssl_cafile ...); no passwords here"""

    @field_validator("security")
    @classmethod
    def _without_secrets(cls, security: dict[str, str]) -> dict[str, str]:
        """A configuration is stored with its run, shown in reports and given to MLflow."""
        for key, value in security.items():
            if key in SECRET_KEYS or (key == "proxy_url" and "@" in value):
                raise ValueError(
                    f"{key} is a secret, and a configuration is stored with its run: set the environment variable "
                    f"DRIFTLOG_KAFKA_{key.upper()}, or DRIFTLOG_KAFKA_{key.upper()}_FILE to a file that holds it"
                )
        return security


class MlflowSection(Section):
    """[mlflow]"""

    enabled: bool = True
    uri: str = ""
    """tracking address; empty: sqlite in the run directory; MLFLOW_TRACKING_URI overrides it"""
    experiment: str = "driftlog"
    best_metric: str = "critic/rewards/mean"
    """highest value: alias `best` in the registry, where no version was evaluated; empty: no such alias"""

    @field_validator("uri")
    @classmethod
    def _without_password(cls, uri: str) -> str:
        """A configuration is stored with its run and given to MLflow itself."""
        if urlsplit(uri).password is not None:
            raise ValueError(
                "a password stands in this address, and a configuration is stored with its run: set the environment "
                "variable MLFLOW_TRACKING_URI"
            )
        return uri


class ViewSection(Section):
    """[view]"""

    refresh_s: float = Field(default=1.0, gt=0)


# The broker ends an abandoned transaction this long after its time-out at the latest (its clean-up interval).
TRANSACTION_CLEANUP_S = 1.0


class Config(Section):
    """A whole configuration."""

    run: RunSection = RunSection()
    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    trainer: TrainerSection = TrainerSection()
    lora: LoraSection = LoraSection()
    objective: ObjectiveSection = ObjectiveSection()
    reference: ReferenceSection = ReferenceSection()
    replay: ReplaySection = ReplaySection()
    generator: GeneratorSection = GeneratorSection()
    vllm: VllmSection = VllmSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    evaluation: EvaluationSection = EvaluationSection()
    kafka: KafkaSection = KafkaSection()
    mlflow: MlflowSection = MlflowSection()
    view: ViewSection = ViewSection()
    alarms: AlarmsSection = AlarmsSection()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> Self:
        for problem in problems(self, is_stored=bool(info.context and info.context.get("is_stored"))):
            raise ValueError(problem)
        return self

    def digest(self) -> str:
        """sha256 hex over the learning settings: what decides the weights."""
        return hashlib.sha256(json.dumps(learning_settings(self), sort_keys=True).encode()).hexdigest()


def problems(config: Config, *, is_stored: bool = False) -> list[str]:
    """Every combination that cannot work, in words that state the inequality and the way out.

    is_stored: of a run that was made. What a worker waited for is its history then, and no reason not to read it.
    """
    trainer, kafka, coordinator = config.trainer, config.kafka, config.coordinator
    found = []
    try:
        run_id(config.run.name)
    except ValueError as error:
        found.append(f"run.name: {error}")
    found += trainer_problems(trainer, config.replay, config.reference, config.objective)
    found += lora_problems(config.lora, trainer)
    found += evaluation_problems(config.evaluation, config.task.kind)
    found += vllm_problems(config.vllm, (config.generator.engine, config.evaluation.engine), config.task.max_tokens)
    keep = config.checkpoints.keep
    largest = "hard_max_lag" if trainer.largest_lag != trainer.max_lag else "max_lag"
    if keep != "all" and keep < trainer.largest_lag + 2:
        found.append(
            f"checkpoints.keep = {keep} < trainer.{largest} + 2 = {trainer.largest_lag + 2}: weights that may still be "
            'sampled or switched to would be deleted; raise keep or use "all"'
        )
    if trainer.min_group > config.task.group_size:
        found.append(
            f"trainer.min_group = {trainer.min_group} > task.group_size = {config.task.group_size}: "
            "no group could be used"
        )
    hidden_s = kafka.transaction_timeout_s + TRANSACTION_CLEANUP_S
    for name, value in (("lease_s", coordinator.lease_s), ("switch_deadline_s", coordinator.switch_deadline_s)):
        if hidden_s >= value:
            found.append(
                f"coordinator.{name} = {value:g} <= kafka.transaction_timeout_s + {TRANSACTION_CLEANUP_S:g} = "
                f"{hidden_s:g}: "
                "a trainer killed inside a transaction hides all acknowledgements that long; raise it"
            )
    unnamed_s = trainer.rank_timeout_s + kafka.delivery_timeout_s + hidden_s
    if config.checkpoints.garbage_grace_s <= unnamed_s:
        found.append(
            f"checkpoints.garbage_grace_s = {config.checkpoints.garbage_grace_s:g} <= trainer.rank_timeout_s + "
            f"kafka.delivery_timeout_s + kafka.transaction_timeout_s + {TRANSACTION_CLEANUP_S:g} = {unnamed_s:g}: a "
            "checkpoint whose transaction is under way would be deleted as garbage; raise it"
        )
    if config.generator.heartbeat_s * 3 > coordinator.lease_s:
        found.append(
            f"generator.heartbeat_s = {config.generator.heartbeat_s:g} > coordinator.lease_s / 3 = "
            f"{coordinator.lease_s / 3:g}: two lost heartbeats would expire a living worker"
        )
    if kafka.session_timeout_s >= trainer.group_timeout_s:
        found.append(
            f"kafka.session_timeout_s = {kafka.session_timeout_s:g} >= trainer.group_timeout_s = "
            f"{trainer.group_timeout_s:g}: a killed worker's requests would be given up before another worker gets them"
        )
    # A group's scoring may be cut off twice (infra/reward_processes.py); then it must still be in time.
    if config.task.worker_processes and 2 * config.task.reward_timeout_s >= trainer.group_timeout_s:
        found.append(
            f"2 * task.reward_timeout_s = {2 * config.task.reward_timeout_s:g} >= trainer.group_timeout_s = "
            f"{trainer.group_timeout_s:g}: a group would be given up while its reward may still answer; lower the first"
        )
    if not is_stored:
        found += generator_problems(
            config.generator, switch_deadline_s=coordinator.switch_deadline_s, group_timeout_s=trainer.group_timeout_s
        )
    return found


def learning_settings(config: Config) -> dict[str, Any]:
    """The settings that decide what is learnt, as plain values."""
    plain = config.model_dump(mode="json")
    kept: dict[str, Any] = {}
    for section, values in plain.items():
        if section in OPERATIONAL_SECTIONS:
            continue
        kept[section] = {key: value for key, value in values.items() if f"{section}.{key}" not in OPERATIONAL_KEYS}
    if not config.task.environment:  # as with [lora]
        for key in ENVIRONMENT_KEYS:
            del kept["task"][key]
    if not config.lora.rank:
        del kept["lora"]  # off: the digests of runs without it are those from before there was one
    if config.trainer.schedule != "constant":
        kept["run"]["versions"] = config.run.versions  # every learning rate follows from where the run ends
    return kept


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Learning settings that differ, as `section.key: old -> new`; arguments as from learning_settings."""
    changes = []
    for section in sorted(old.keys() | new.keys()):
        a, b = old.get(section, {}), new.get(section, {})
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                changes.append(f"{section}.{key}: {a.get(key)!r} -> {b.get(key)!r}")
    return changes


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and `a.b=c` overrides. ConfigError names file, key, and what to do."""
    data: dict[str, Any] = {}
    where = "configuration"
    if path is not None:
        where = str(path)
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: no such file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        apply_override(data, override)
    return parse_config(data, where)


def parse_config(data: Mapping[str, Any], where: str, *, is_stored: bool = False) -> Config:
    """Check plain values. ConfigError names the key and, for an unknown one, the nearest known one.

    is_stored: see `problems`."""
    _refuse_unknown(data, where)
    try:
        return Config.model_validate(data, context={"is_stored": is_stored})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {key + ': ' if key else ''}{message}") from error


def known_keys() -> list[str]:
    """Every `section.key`."""
    keys = []
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        keys += [f"{section}.{key}" for key in field.annotation.model_fields]
    return keys


def _refuse_unknown(data: Mapping[str, Any], where: str) -> None:
    known = known_keys()
    sections = list(Config.model_fields)
    for section, values in data.items():
        if section not in sections:
            near = difflib.get_close_matches(section, sections, n=1, cutoff=0.0)
            raise ConfigError(f"{where}: unknown section [{section}]; the nearest is [{near[0]}]")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: [{section}] must be a table of settings")
        for key in values:
            if f"{section}.{key}" not in known:
                near = difflib.get_close_matches(f"{section}.{key}", known, n=1, cutoff=0.0)
                raise ConfigError(f"{where}: unknown key {section}.{key}; the nearest is {near[0]}")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into plain values. ConfigError when it is not written like that."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or len(parts) < 2:
        raise ConfigError(f"--set {override}: write it as section.key=value")
    try:
        value: Any = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    target = data
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {override}: {part} is not a table")
    target[parts[-1]] = value
