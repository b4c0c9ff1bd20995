"""What a training step says of its batch: lag, age, rewards, groups, lengths, drops. Pure; names are registered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from consumers.trainer.batch import BatchRow
from consumers.trainer.selection import ReadyGroup, is_zero_variance
from schemas.ledger import Decision, DecisionRow, Subject


def batch_metrics(
    rows: Sequence[BatchRow],
    groups: Sequence[ReadyGroup],
    penalties: Sequence[float],
    *,
    version_in: int,
    depth_in: int,
    now_us: int,
) -> dict[str, float]:
    """Metrics of one batch. `groups`: those used for the first time; `penalties`: what was added to rewards."""
    return {
        **_row_metrics(rows, version_in, now_us),
        **_group_metrics([group.baseline_rewards() for group in groups]),
        **_issue_metrics(groups, depth_in),
        **({"critic/kl_in_reward": -sum(penalties) / len(penalties)} if penalties else {}),
    }


def drop_metrics(decisions: Iterable[DecisionRow]) -> dict[str, float]:
    """Trajectories dropped in this transaction, by reason: how many, how long, how good. Dropping what is late drops
    what is long, so compare with response_length and critic/rewards."""
    dropped: dict[str, list[DecisionRow]] = defaultdict(list)
    for row in decisions:
        if row.subject is Subject.TRAJECTORY and row.decision is Decision.DROPPED:
            dropped[row.reason].append(row)
    metrics: dict[str, float] = {}
    for reason, rows in sorted(dropped.items()):
        metrics[f"dropped/{reason}"] = float(len(rows))
        lengths = [float(row.completion_tokens) for row in rows if row.completion_tokens is not None]
        rewards = [row.reward for row in rows if row.reward is not None]
        metrics |= _mean(f"dropped_length/{reason}", lengths) | _mean(f"dropped_reward/{reason}", rewards)
    return metrics


def _row_metrics(rows: Sequence[BatchRow], version_in: int, now_us: int) -> dict[str, float]:
    if not rows:
        return {}
    metrics = _histogram("policy_lag", [row.policy_lag for row in rows])
    metrics |= _spread("age_seconds", [(now_us - row.trajectory.finished_at_us) / 1e6 for row in rows])
    metrics |= _mean("age_seconds/from_issue_mean", [(now_us - row.trajectory.requested_at_us) / 1e6 for row in rows])
    metrics["replay/rows"] = float(sum(row.use_count > 1 for row in rows))
    metrics |= _spread("response_length", [float(len(row.trajectory.token_ids)) for row in rows])
    truncated = sum(row.trajectory.finish_reason == "length" for row in rows)
    metrics["response_length/clip_ratio"] = truncated / len(rows)
    for version, count in sorted(Counter(s.version for row in rows for s in row.trajectory.segments).items()):
        metrics[f"samples_per_version/back_{version_in - version}"] = float(count)
    by_task, by_lag, by_version = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in rows:
        reward = row.trajectory.reward
        if reward is not None:
            by_task[row.trajectory.task].append(reward)
            by_lag[row.policy_lag].append(reward)
            by_version[version_in - row.trajectory.segments[-1].version].append(reward)
    for task, rewards in sorted(by_task.items()):
        metrics |= _mean(f"reward_by_task/{task}", rewards)
    for lag, rewards in sorted(by_lag.items()):
        metrics |= _mean(f"reward_by_lag/{lag}", rewards)
    for back, rewards in sorted(by_version.items()):
        metrics |= _mean(f"reward_by_version/back_{back}", rewards)
    return metrics


def _group_metrics(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    flat = [reward for group in rewards for reward in group]
    if not flat:
        return {}
    return {
        **_spread("critic/rewards", flat),
        "group/reward_variance": sum(_variance(group) for group in rewards) / len(rewards),
        "group/zero_variance": sum(is_zero_variance(group) for group in rewards) / len(rewards),
        "group/all_right": sum(min(group) >= 1.0 for group in rewards) / len(rewards),
        "group/all_wrong": sum(max(group) <= 0.0 for group in rewards) / len(rewards),
    }


def _issue_metrics(groups: Sequence[ReadyGroup], depth_in: int) -> dict[str, float]:
    """Lag counted from the request's issue: what pacing and generation cost together, one value a trained row."""
    lags = []
    for group in groups:
        issued = group.buffer.group.issued_depth
        if issued is not None:
            lags += [depth_in - issued] * sum(member.trained for member in group.members)
    return _histogram("policy_lag_from_issue", lags)


def _histogram(name: str, values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    counts = {f"{name}/count_{value}": float(count) for value, count in sorted(Counter(values).items())}
    return {**_spread(name, [float(value) for value in values]), **counts}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = sum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: sum(values) / len(values)} if values else {}


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)
