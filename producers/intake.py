"""The worker's side of the prompts topic: claims requests, parks them until they may start, commits finished ones.

Offsets are committed only for owned partitions and only past requests whose trajectories are acknowledged by the
log (or that need none). Only an admitted worker holds partitions at all.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from infra.logs import event
from infra.ports import Clock, EventWriter, GroupReader, Message, Record
from producers.assembly import ClaimedGroup
from producers.claim_watch import ClaimWatch
from producers.claims import Claims
from schemas.errors import InvalidRecord, LogError
from schemas.headers import dead_letter_headers
from schemas.ids import RunId
from schemas.ledger import Reason
from schemas.policy_fold import PolicyFold
from schemas.prompt_codec import decode_request
from schemas.topics import TopicName, topic

log = logging.getLogger(__name__)

POISON_PROMPT = "poison_prompt"
"""code of the dead letter; the trainer decides the group by it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRules:
    """Limits of one worker."""

    run: RunId
    park_timeout_s: float
    poison_after: int
    """incarnations that died holding a request before it is given up"""


class Intake:
    """Requests this worker has claimed and not started, and what of them is finished."""

    def __init__(
        self, rules: IntakeRules, *, prompts: GroupReader, writer: EventWriter, watch: ClaimWatch, clock: Clock
    ) -> None:
        self._rules = rules
        self._prompts = prompts
        self._writer = writer
        self._watch = watch
        self._clock = clock
        self._claims = Claims()
        self._parked: list[ClaimedGroup] = []
        self._subscribed = False

    def __len__(self) -> int:
        return len(self._parked)

    def subscribe(self, wanted: bool) -> None:
        """Hold prompt partitions, or give them back."""
        if wanted and not self._subscribed:
            self._prompts.rejoin()
        elif not wanted and self._subscribed:
            self.commit()
            self._prompts.leave()
        self._subscribed = wanted
        owned = self._prompts.assignment() if wanted else frozenset()
        for partition in self._claims.owned() - owned:
            self._claims.revoke(partition)
            self._parked = [group for group in self._parked if group.partition != partition]
        for partition in owned - self._claims.owned():
            self._claims.assign(partition, self._prompts.committed(partition))

    def take(self, room: int, incarnation: str, fold: PolicyFold, under_way: frozenset[str]) -> None:
        """Claim up to `room` requests. A group of `under_way` is being worked on: its partition went and came back
        meanwhile, and the claim ends with that work."""
        if not self._watch.advance():
            return
        for record in self._prompts.poll(room):
            if self._claims.take(record.partition, record.offset):
                self._claim(record, incarnation, fold, under_way)

    def startable(self, fold: PolicyFold, held: int) -> list[ClaimedGroup]:
        """Claimed requests that may run under the version held; what the trainer no longer waits for is dropped.

        A request for a newer version waits a while, then runs under an older one that is still allowed. Weights of
        another branch than the newest version's would be sampled for nothing: all wait for the switch."""
        assert fold.newest is not None
        on_branch = not isinstance(fold.lag(held, fold.newest), Reason)
        oldest_open = fold.versions[fold.newest].event.oldest_open_request
        now_s = self._clock.monotonic_s()
        starting: list[ClaimedGroup] = []
        parked: list[ClaimedGroup] = []
        for group in self._parked:
            waited = now_s - group.claimed_at_s >= self._rules.park_timeout_s
            if group.request.request_position < oldest_open:
                self._claims.finish(group.partition, group.offset)
            elif on_branch and (
                held >= group.request.min_version or (waited and held >= group.request.fallback_version)
            ):
                starting.append(group)
            else:
                parked.append(group)
        self._parked = parked
        return starting

    def finish(self, partition: int, offset: int) -> None:
        """Done with a request; ignored for partitions that went."""
        self._claims.finish(partition, offset)

    def commit(self) -> None:
        """Commit what is new."""
        commits = self._claims.commits()
        if commits:
            self._prompts.commit(commits)

    def _claim(self, record: Record, incarnation: str, fold: PolicyFold, under_way: frozenset[str]) -> None:
        try:
            request = decode_request(record.value, record.headers)
            if request.group_id in under_way:
                return
            deaths = self._watch.deaths(fold, request.group_id)
            if len(deaths) >= self._rules.poison_after:
                names = ", ".join(f"{worker}/{incarnation}" for worker, incarnation in deaths)
                raise InvalidRecord(POISON_PROMPT, f"{len(deaths)} workers died holding it: {names}")
        except InvalidRecord as error:
            self._give_up(record, error)
            return
        self._parked.append(
            ClaimedGroup(
                request=request,
                partition=record.partition,
                offset=record.offset,
                incarnation=incarnation,
                claimed_at_s=self._clock.monotonic_s(),
            )
        )

    def _give_up(self, record: Record, error: InvalidRecord) -> None:
        """To the dead letters with its original bytes; it counts as finished only once that is handed over."""
        event(
            log, "request_given_up", level=logging.WARNING, topic=record.topic, partition=record.partition,
            offset=record.offset, reason=str(error),
        )  # fmt: skip
        headers = dead_letter_headers(
            record.headers, topic=record.topic, partition=record.partition, offset=record.offset, error=error
        )
        dead = topic(self._rules.run, TopicName.DEADLETTERS)
        try:
            self._writer.send(Message(topic=dead, key=record.key or b"", value=record.value, headers=headers))
        except LogError as failure:
            # Not finished: the next owner of the partition finds it again.
            event(
                log, "dead_letter_not_sent", level=logging.WARNING, topic=record.topic, partition=record.partition,
                offset=record.offset, reason=str(failure),
            )  # fmt: skip
            return
        self._claims.finish(record.partition, record.offset)
