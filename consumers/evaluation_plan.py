"""Which versions are evaluated and what each is asked. Pure: the policy fold and what was done before decide.

Guarantees: the same run seed, version, prompt and sample number ask the same thing with the same randomness, in
every process and after every restart; a version is chosen at most once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from infra.ports import Completion, Prompt, Reward
from schemas.evaluation_codec import EvaluationRow
from schemas.ids import GroupKey, RunId, group_id
from schemas.policy_fold import PolicyFold
from schemas.policy_state import VersionStatus
from schemas.trajectory import PromptRequest, Sampling

# Not the run's own name: its groups are other ones, and two runs of one seed are asked with the same randomness.
_RUN = RunId("evaluation")
_GREEDY, _SAMPLED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One way to ask every prompt."""

    sampling: Sampling
    """temperature 0: the most probable answer"""
    samples: int
    """answers of one prompt"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to evaluate next, and what is left out for good."""

    version: int | None
    skipped: tuple[tuple[int, str], ...] = ()
    """(version, why), in order"""


def wanted_versions(fold: PolicyFold, every_versions: int) -> tuple[int, ...]:
    """Every K-th version that was activated, the first one included; after the end of the run the newest one too."""
    activated = [number for number, state in fold.versions.items() if state.activated_at_offset is not None]
    wanted = activated[::every_versions]
    if fold.ended and fold.newest is not None and fold.newest not in wanted:
        wanted.append(fold.newest)
    return tuple(wanted)


def choose(fold: PolicyFold, every_versions: int, settled: Collection[int]) -> Choice:
    """The newest wanted version above all that are settled (evaluated, or given up): an evaluator that falls behind
    leaves versions out, it never lags further and further behind."""
    floor = max(settled, default=-1)
    waiting = [number for number in wanted_versions(fold, every_versions) if number > floor]
    kept = [number for number in waiting if fold.versions[number].status is not VersionStatus.RETIRED]
    version = kept[-1] if kept else None
    skipped = [
        (number, f"version {version} was there before its turn came" if number in kept else "retired")
        for number in waiting
        if number != version
    ]
    return Choice(version=version, skipped=tuple(skipped))


def evaluation_requests(prompts: Sequence[Prompt], asks: Sequence[Ask], version: int) -> list[PromptRequest]:
    """Every prompt asked in every way. The group id, which the engine's randomness hangs on, names version, prompt and
    way."""
    asked = [(prompt, ask) for prompt in prompts for ask in asks]
    return [_request(prompt, ask, version, position) for position, (prompt, ask) in enumerate(asked)]


def evaluation_rows(
    request: PromptRequest, completions: Sequence[Completion], rewards: Sequence[Reward], *, version: int, at_us: int
) -> list[EvaluationRow]:
    """The rows of one group; `rewards` in the order of `completions`."""
    rows = [
        EvaluationRow(
            version=version,
            task=request.task,
            prompt_id=request.prompt_id,
            sample=completion.index_in_group,
            temperature=request.sampling.temperature,
            reward=reward.value,
            reward_error=reward.error,
            completion_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            evaluated_at_us=at_us,
        )
        for completion, reward in zip(completions, rewards, strict=True)
    ]
    return sorted(rows, key=lambda row: row.sample)


def _request(prompt: Prompt, ask: Ask, version: int, position: int) -> PromptRequest:
    way = _SAMPLED if ask.sampling.temperature > 0 else _GREEDY
    return PromptRequest(
        group_id=group_id(GroupKey(run=_RUN, prompt=prompt.index, epoch=version, attempt=way)),
        request_position=position,
        prompt_id=prompt.prompt_id,
        task=prompt.task,
        epoch=version,
        attempt=way,
        group_size=ask.samples,
        prompt_token_ids=prompt.token_ids,
        prompt_text=prompt.text,
        reference=dict(prompt.reference),
        sampling=ask.sampling,
        intended_step=0,
        min_version=version,
        fallback_version=version,
        issued_at_us=0,
    )
