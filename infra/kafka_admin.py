"""Topics of a run, and where their partitions begin and end.

Topics are created from the registry and from nowhere else; existing ones are checked, never changed.
Every question has the settings' request_timeout_s as its limit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kafka import KafkaAdminClient, OffsetSpec, TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from infra.kafka_clients import KafkaSettings, build, common_config, explain
from infra.logs import event
from infra.record_queue import Place
from schemas.errors import EnvironmentMissing, IllegalState, LogUnavailable
from schemas.ids import RunId
from schemas.topics import MAX_MESSAGE_BYTES, TOPICS, topic

_LOG = logging.getLogger(__name__)

_UNCOMMITTED = "read_uncommitted"
_COMMITTED = "read_committed"
_LIMIT_KEY = "max.message.bytes"
_CLEANUP_KEY = "cleanup.policy"


class KafkaOffsets:
    """Where partitions begin and end. Thread-safe; holds one connection of its own."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._client = build(KafkaAdminClient, settings, common_config(settings))

    def beginnings(self, places: Iterable[Place]) -> dict[Place, int]:
        """The first offset that is still there."""
        return self._ask(places, OffsetSpec.EARLIEST, _UNCOMMITTED)

    def stable_ends(self, places: Iterable[Place]) -> dict[Place, int]:
        """The last stable offset: everything below is decided."""
        return self._ask(places, OffsetSpec.LATEST, _COMMITTED)

    def high_watermarks(self, places: Iterable[Place]) -> dict[Place, int]:
        """The end, open transactions included."""
        return self._ask(places, OffsetSpec.LATEST, _UNCOMMITTED)

    def close(self) -> None:
        """Safe to call twice."""
        self._client.close()

    def _ask(self, places: Iterable[Place], spec: Any, isolation: str) -> dict[Place, int]:
        asked = {TopicPartition(*place): spec for place in places}
        try:
            answers = self._client.list_partition_offsets(
                asked, isolation_level=isolation, timeout_ms=int(self._settings.request_timeout_s * 1000)
            )
        except kafka_errors.KafkaError as error:
            topics = sorted({place.topic for place in asked})
            raise explain(error, f"offsets of {', '.join(topics)} at {self._settings.bootstrap_servers}") from error
        return {(place.topic, place.partition): answer.offset for place, answer in answers.items()}


class KafkaLogAdmin:
    """The LogAdmin port."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._client = build(KafkaAdminClient, settings, common_config(settings))

    def create_topics(self, run: str) -> None:
        """Every topic of the registry for this run. IllegalState when one exists with other partitions."""
        wanted = {topic(RunId(run), name): spec for name, spec in TOPICS.items()}
        existing = self.existing_topics()
        missing: dict[str, dict[str, Any]] = {
            name: {
                "num_partitions": spec.partitions,
                "replication_factor": self._settings.replication_factor,
                "configs": spec.broker_config(),
            }
            for name, spec in wanted.items()
            if name not in existing
        }
        if missing:
            self._create(missing)
        check_partitions(self.partition_counts(wanted), {name: spec.partitions for name, spec in wanted.items()})
        self._check_cleanup({name: spec.cleanup for name, spec in wanted.items() if name in existing})

    def existing_topics(self) -> frozenset[str]:
        """Names of all topics."""
        try:
            return frozenset(self._client.list_topics())
        except kafka_errors.KafkaError as error:
            raise explain(error, f"list topics at {self._settings.bootstrap_servers}") from error

    def partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Partitions of each topic; EnvironmentMissing names one that is not there or may not be described."""
        names = sorted(topics)
        try:
            answers = self._client.describe_topics(names)
        except kafka_errors.KafkaError as error:
            raise explain(error, f"describe topics {', '.join(names)}") from error
        counts: dict[str, int] = {}
        for answer in answers:
            if answer["error_code"]:
                refusal = kafka_errors.for_code(answer["error_code"])()
                raise EnvironmentMissing(
                    f"topic {answer['name']}: {refusal}; create it (`driftlog topics`), or grant this user the right "
                    "(`driftlog acl`)"
                )
            counts[answer["name"]] = len(answer["partitions"])
        return counts

    def max_message_bytes(self, name: str) -> int:
        """The topic's limit for one compressed batch."""
        return int(self._settings_of([name], _LIMIT_KEY)[name])

    def close(self) -> None:
        """Safe to call twice."""
        self._client.close()

    def _settings_of(self, names: Iterable[str], key: str) -> dict[str, str]:
        names = sorted(names)
        resources = [ConfigResource(ConfigResourceType.TOPIC, name, configs=[key]) for name in names]
        try:
            answer = self._client.describe_configs(resources, config_filter="all")
        except kafka_errors.KafkaError as error:
            raise explain(error, f"{key} of {', '.join(names)}") from error
        found = answer["topic"]
        for name in names:
            if key not in found.get(name, {}):  # the client leaves a refusal out, without a word
                raise EnvironmentMissing(
                    f"topic {name}: its {key} may not be asked by this user, or there is no such topic: grant the "
                    "right describe_configs (`driftlog acl` makes the rules)"
                )
        return {name: str(settings[key]["value"]) for name, settings in found.items()}

    def _check_cleanup(self, expected: dict[str, str]) -> None:
        """A compacted history is none: IllegalState names a topic somebody made, or changed, that way."""
        found = self._settings_of(expected, _CLEANUP_KEY) if expected else {}
        for name, cleanup in expected.items():
            if found[name] != cleanup:
                raise IllegalState(
                    f"topic {name} has {_CLEANUP_KEY} {found[name]!r}, this project expects {cleanup!r}: what "
                    f"compaction removed cannot be audited or replayed; set it back, or use another run name"
                )

    def _create(self, missing: dict[str, dict[str, Any]]) -> None:
        try:
            # Another service may create them at the same moment: that is not an error, the check follows.
            answer = self._client.create_topics(missing, raise_errors=False)
            for one in answer["topics"]:
                refusal = kafka_errors.for_code(one["error_code"])
                if refusal not in (kafka_errors.NoError, kafka_errors.TopicAlreadyExistsError):
                    raise refusal(f"{one['name']}: {one.get('error_message')}")
            self._client.wait_for_topics(sorted(missing), timeout_ms=int(self._settings.request_timeout_s * 1000))
        except kafka_errors.KafkaError as error:
            raise explain(error, f"create topics {', '.join(sorted(missing))}") from error


class TopicLimits:
    """How large a record each topic takes, asked once a topic.

    A batch that the broker refuses for its size is fatal to an idempotent client: records of other keys fail
    with it. So the writer refuses such a record itself, before it can do that harm.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._limits: dict[str, int] = {}

    def limit(self, name: str) -> int:
        """Bytes of a compressed batch; the registry's limit while the broker does not say."""
        if name not in self._limits:
            try:
                admin = KafkaLogAdmin(self._settings)
                try:
                    self._limits[name] = admin.max_message_bytes(name)
                finally:
                    admin.close()
            except LogUnavailable:
                return MAX_MESSAGE_BYTES
            except EnvironmentMissing as error:  # this user may write the topic, not describe it
                event(_LOG, "topic_limit_unknown", topic=name, reason=str(error))
                self._limits[name] = MAX_MESSAGE_BYTES
        return self._limits[name]


def check_partitions(found: dict[str, int], expected: dict[str, int]) -> None:
    """Keys map to partitions: another number of them scatters one group's records. IllegalState names the topic."""
    for name, count in expected.items():
        if found.get(name) != count:
            raise IllegalState(
                f"topic {name} has {found.get(name)} partitions, this project expects {count}: partition counts are "
                "fixed for life; use another run name, or restore the topic"
            )
