"""What the trainer service is given: its limits, and the outside world."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from consumers.trainer.batch import Learner
from consumers.trainer.branching import BranchWish
from consumers.trainer.publication import Publication
from consumers.trainer.replay import ReplayRules
from consumers.trainer.requests import RequestRules
from consumers.trainer.selection import SelectionRules
from consumers.trainer.step import StepMaker
from infra.policy_follower import PolicyFollower
from infra.ports import Clock, EventReader, PromptSource, TransactionalWriter
from schemas.ids import RunId
from schemas.trajectory_codec import TrajectoryLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Everything the service decides by."""

    run: RunId
    requests: RequestRules
    selection: SelectionRules
    limits: TrajectoryLimits
    config_digest: str
    code_revision: str
    replay: ReplayRules = field(default_factory=ReplayRules)
    refill_rounds: int = 3
    """times a step's zero-variance groups are replaced; then the step takes a smaller batch"""
    group_timeout_s: float
    """from a group's issue to its drop as incomplete or lost"""
    settle_after_s: float = 1.0
    """decisions wait at most this long for a step to carry them"""
    max_pending_decisions: int = 4096
    """bounds memory: more are settled before anything else is read"""
    poll_records: int = 64
    step_tries: int = 3
    state_every: int = 1
    """optimizer state is saved with every K-th version (and the last one); a restart from another one branches"""
    branch: BranchWish | None = None
    recoveries_in_row: int = 10
    last_switch_wait_s: float = 10.0
    """the run ends once its last version is live, or this long after it was published"""
    publication_limit_s: float = 600.0
    """a publication behind the compute that takes longer means a store that hangs: the trainer stops"""


@dataclass(slots=True, kw_only=True)
class TrainerPorts:
    """The outside world of the trainer."""

    writer: TransactionalWriter
    open_policy: Callable[[], PolicyFollower]
    open_ledger: Callable[[], EventReader]
    trajectories: EventReader
    deadletters: EventReader
    """from the beginning; workers name there the prompts that kill them"""
    learner: Learner
    publication: Publication
    step_maker: StepMaker
    prompts: PromptSource
    clock: Clock
    executor: Executor | None = None
    """one thread, for publications behind the compute; None: a step is published before the next one begins"""
