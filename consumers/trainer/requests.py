"""Makes prompt requests: fresh prompts from the source, or the same prompt again with the next attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from consumers.trainer.pacing import PacingRules, fallback_depth, intended_step, min_depth, requests_to_issue
from infra.ports import Prompt, PromptSource
from schemas.ids import GroupKey, RunId, group_id, parse_group_id
from schemas.ledger import OpenGroup
from schemas.policy_fold import PolicyFold
from schemas.trace_context import request_context
from schemas.trajectory import PromptRequest, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """Fixed for a run."""

    run: RunId
    group_size: int
    max_lag: int
    max_attempts: int
    sampling: Sampling
    pacing: PacingRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where the next request comes from."""

    next_request: int
    prompt_cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """What one transaction asks for."""

    requests: tuple[PromptRequest, ...]
    groups: tuple[OpenGroup, ...]
    cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The newest version in the transaction that carries the requests."""

    version: int
    depth: int
    parent: int | None = None
    """set when this very transaction publishes `version`, so that the fold does not know it yet"""
    step_is_full: bool = False
    """the step at hand takes no more groups (its refill rounds are used up): ask for the next one"""


def issue(
    open_groups: tuple[OpenGroup, ...],
    again: tuple[OpenGroup, ...],
    cursor: Cursor,
    head: Head,
    source: PromptSource,
    fold: PolicyFold,
    rules: RequestRules,
    now_us: int,
) -> Issued:
    """All requests that keep the pacing invariant, re-issued prompts first.

    Args: open_groups: the open set after this transaction's decisions; again: groups it drops that get another
    attempt, with the step they were meant for.
    """
    count = requests_to_issue(len(open_groups), head.depth, rules.pacing)
    steps = [group.intended_step for group in open_groups]
    requests: list[PromptRequest] = []
    for _ in range(count):
        old = again[len(requests)] if len(requests) < len(again) else None
        if old is not None:
            key = parse_group_id(old.group_id)
            prompt, epoch, attempt = source.by_index(key.prompt), key.epoch, key.attempt + 1
        else:
            prompt, epoch = source.at(cursor.prompt_cursor)
            attempt = 0
            cursor = Cursor(next_request=cursor.next_request, prompt_cursor=cursor.prompt_cursor + 1)
        step = intended_step(steps, head.depth + head.step_is_full, rules.pacing)
        steps.append(step)
        requests.append(_request(prompt, epoch, attempt, cursor.next_request, step, head, fold, rules, now_us))
        cursor = Cursor(next_request=cursor.next_request + 1, prompt_cursor=cursor.prompt_cursor)
    groups = tuple(
        OpenGroup(
            group_id=r.group_id,
            request_position=r.request_position,
            issued_at_us=now_us,
            attempt=r.attempt,
            intended_step=r.intended_step,
            issued_depth=head.depth,
        )
        for r in requests
    )
    return Issued(requests=tuple(requests), groups=groups, cursor=cursor)


def may_try_again(group: OpenGroup, rules: RequestRules) -> bool:
    """Another attempt is allowed; otherwise the prompt is on the never-trained list."""
    return group.attempt + 1 < rules.max_attempts


def _request(
    prompt: Prompt,
    epoch: int,
    attempt: int,
    position: int,
    step: int,
    head: Head,
    fold: PolicyFold,
    rules: RequestRules,
    now_us: int,
) -> PromptRequest:
    key = GroupKey(run=rules.run, prompt=prompt.index, epoch=epoch, attempt=attempt)
    name = group_id(key)
    return PromptRequest(
        group_id=name,
        request_position=position,
        prompt_id=prompt.prompt_id,
        task=prompt.task,
        epoch=epoch,
        attempt=attempt,
        group_size=rules.group_size,
        prompt_token_ids=prompt.token_ids,
        prompt_text=prompt.text,
        reference=dict(prompt.reference),
        sampling=rules.sampling,
        intended_step=step,
        min_version=_version_at(min_depth(step, head.depth, rules.pacing), head, fold),
        fallback_version=_version_at(fallback_depth(step, rules.max_lag), head, fold),
        issued_at_us=now_us,
        traceparent=str(request_context(name, now_us)),
    )


def _version_at(depth: int, head: Head, fold: PolicyFold) -> int:
    """The version with that depth on the chain of `head`."""
    if depth >= head.depth:
        return head.version
    return fold.version_at_depth(head.version if head.parent is None else head.parent, depth)
