"""What a service that nobody supervises waits for before it begins: broker, topics, and a run that is open.

`driftlog up` sees to all three itself. Guarantees: every wait has a limit, ends at once when the service is told to
stop, and says at its limit what is missing and who makes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from driftlog.broker_access import kafka_settings
from infra.config import Config
from infra.logs import event
from infra.ports import Clock
from schemas.errors import EnvironmentMissing, LogUnavailable
from schemas.ids import RunId
from schemas.policy_fold import PolicyFold
from schemas.topics import TOPICS, TopicName, topic

log = logging.getLogger(__name__)

Pause = Callable[[float], bool]
"""waits so many seconds at most; True: the service was told to stop"""
LOOK_AGAIN_S = 0.5
READ_AGAIN_S = 0.1
REOPENING_LIMIT_S = 180.0
"""a trainer loads its libraries and its newest checkpoint before it opens an ended run again"""


def join(config: Config, bootstrap: str, *, limit_s: float, reopened: bool, clock: Clock, pause: Pause) -> bool:
    """Wait for everything. False: told to stop meanwhile. `reopened`: not the trainer, which opens the run itself."""
    wanted = {topic(RunId(config.run.name), name) for name in TOPICS}
    if not await_topics(
        lambda: _existing_topics(config, bootstrap), wanted, where=bootstrap, limit_s=limit_s, clock=clock, pause=pause
    ):
        return False
    if not reopened:
        return True
    with _FoldReader(config, bootstrap) as reader:
        return await_reopening(
            reader.read, config.run.name, config.run.versions, limit_s=REOPENING_LIMIT_S, clock=clock, pause=pause
        )


def await_topics(
    look: Callable[[], Collection[str]],
    wanted: Collection[str],
    *,
    where: str,
    limit_s: float,
    clock: Clock,
    pause: Pause,
) -> bool:
    """True when all are there, False when told to stop. LogUnavailable: no broker; EnvironmentMissing: no topics."""
    deadline_s = clock.monotonic_s() + limit_s
    said = False
    while True:
        problem: LogUnavailable | EnvironmentMissing
        try:
            missing = sorted(set(wanted) - set(look()))
        except LogUnavailable as error:
            problem = LogUnavailable(f"{error} (waited {limit_s:g} s)")
        else:
            if not missing:
                return True
            problem = EnvironmentMissing(
                f"{where} has no topic {missing[0]} ({len(missing)} of {len(wanted)} are missing after {limit_s:g} s): "
                "`driftlog prepare` or `driftlog topics` makes them, `driftlog acl` lets this user see them"
            )
        if clock.monotonic_s() >= deadline_s:
            raise problem
        if not said:
            event(log, "waiting_for_the_log", reason=str(problem))
            said = True
        if pause(LOOK_AGAIN_S):
            return False


def await_reopening(
    read: Callable[[], PolicyFold | None], run: str, versions: int, *, limit_s: float, clock: Clock, pause: Pause
) -> bool:
    """Wait until an ended run that is to have more versions is open again: before, a service would read the old end
    and leave. True at once for every other run; False when told to stop. LogUnavailable when no trainer opens it.

    `read`: the policy state, None while the log is not read to its end."""
    deadline_s = clock.monotonic_s() + limit_s
    while True:
        fold = read()
        trained = 0 if fold is None or fold.newest is None else fold.versions[fold.newest].depth
        if fold is not None and (not fold.ended or trained >= versions):
            return True
        if clock.monotonic_s() >= deadline_s:
            if fold is None:
                raise LogUnavailable(f"the policy topic of run {run} was not read to its end within {limit_s:g} s")
            raise LogUnavailable(
                f"run {run} ended with {trained} versions and is to have {versions}, but no trainer opened it again "
                f"within {limit_s:g} s: see what `driftlog train` says"
            )
        if pause(READ_AGAIN_S):
            return False


def _existing_topics(config: Config, bootstrap: str) -> frozenset[str]:
    from infra.kafka_admin import KafkaLogAdmin

    admin = KafkaLogAdmin(kafka_settings(config, bootstrap))
    try:
        return admin.existing_topics()
    finally:
        admin.close()


class _FoldReader:
    """Folds the policy topic as far as it is committed."""

    def __init__(self, config: Config, bootstrap: str) -> None:
        from infra.kafka_reader import KafkaEventReader
        from infra.policy_follower import PolicyFollower

        name = topic(RunId(config.run.name), TopicName.POLICY)
        self._reader = KafkaEventReader(
            kafka_settings(config, bootstrap), {name: TOPICS[TopicName.POLICY].partitions}, "beginning"
        )
        self._follower = PolicyFollower(self._reader, name)

    def __enter__(self) -> _FoldReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self) -> PolicyFold | None:
        """The fold of what is committed now; None while some of it has not arrived."""
        end = self._follower.end_offset()
        while self._follower.advance():
            pass
        return self._follower.fold if self._follower.read_up_to >= end else None
