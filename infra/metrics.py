"""Every metric there is: name or pattern, unit, kind, meaning. A name that is not here fails a test.

docs/metrics.md is made from it: python -m infra.metrics > docs/metrics.md. verl's names where verl has one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

Kind = Literal["value", "count", "total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, or a family whose names differ in the parts in braces: `dropped/{reason}`."""

    name: str
    unit: str
    kind: Kind
    """value: of this step; count: of this step, adds up over steps; total: since the start of the run"""
    meaning: str


def _metrics(kind: Kind, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name=name, unit=unit, kind=kind, meaning=meaning) for name, unit, meaning in rows)


def _spread(name: str, unit: str, meaning: str) -> tuple[Metric, ...]:
    words = (("mean", "mean"), ("max", "largest"), ("min", "smallest"))
    return _metrics("value", *((f"{name}/{end}", unit, f"{meaning}: {word}") for end, word in words))


UPDATE = (
    *_metrics(
        "value",
        ("actor/pg_loss", "loss", "the loss of the step; its gradient counts, its value says little"),
        ("actor/grad_norm", "norm", "total gradient norm over all ranks before clipping, mean over optimizer steps"),
        ("actor/lr", "1", "learning rate of the last optimizer step"),
        ("actor/entropy", "nats", "mean entropy of the next-token distribution; a steady fall to 0 is collapse"),
        ("actor/ppo_kl", "nats", "mean of -log ratio: how far the policy moved from the denominator; may be negative"),
        ("actor/ppo_kl_last", "nats", "the same at the last optimizer step of the training step"),
        ("actor/ratio_mean", "ratio", "mean clip ratio; near 1"),
        ("actor/ratio_ess", "share", "effective sample size of the clip ratio; falls before the reward does"),
        ("actor/ratio_chi2", "1", "mean squared clip ratio minus 1; grows with a few large ratios"),
        ("actor/ratio_k3", "nats", "divergence from the denominator, never negative; about 0 at lag 0"),
        ("actor/log_ratio_min", "nats", "smallest log clip ratio, before the clamp"),
        ("actor/log_ratio_max", "nats", "largest log clip ratio, before the clamp"),
        ("actor/log_ratio_p{percent}", "nats", "percentiles 01, 05, 50, 95, 99 of the log clip ratio, raw"),
        ("actor/log_ratio_clamped_fraction", "share", "tokens outside +-20; above 0 is a fault somewhere"),
        ("actor/pg_clipfrac", "share", "tokens where the clip binds, high and low"),
        ("actor/pg_clipfrac_last", "share", "the same at the last optimizer step of the training step"),
        ("actor/clipfrac_high", "share", "tokens with ratio > 1 + clip_high and advantage > 0"),
        ("actor/clipfrac_low", "share", "tokens with ratio < 1 - clip_low and advantage < 0"),
        ("actor/pg_clipfrac_lower", "share", "tokens dual clip cut (ratio > dual_clip, advantage < 0)"),
        ("actor/clipfrac_delta", "share", "tokens the two-sided bound cut (ratio > two_sided_delta, advantage < 0)"),
        ("actor/cispo_capped_fraction", "share", "tokens whose cispo weight was cut above"),
        ("actor/cispo_floored_fraction", "share", "tokens whose cispo weight was raised to the floor"),
        ("actor/rejected_fraction", "share", "tokens the correction's mask rejected"),
        ("actor/kl_ref_k1", "nats", "divergence from the reference, estimator k1; may be negative"),
        ("actor/kl_ref_k2", "nats", "divergence from the reference, estimator k2"),
        ("actor/kl_ref_k3", "nats", "divergence from the reference, estimator k3"),
        ("actor/kl_ref_clamped_fraction", "share", "tokens outside +-10 nats of the reference"),
        ("reference/version", "version", "whose weights the reference was in this step; -1: of no version of this run"),
    ),
)
MISMATCH = (
    *_metrics(
        "value",
        ("mismatch/raw_mean", "ratio", "RAW weight trainer over generator, before cap and mask"),
        ("mismatch/raw_ess", "share", "effective sample size of the RAW weight"),
        ("mismatch/raw_chi2", "1", "mean squared RAW weight minus 1"),
        ("mismatch/raw_k3", "nats", "divergence of trainer and generator; about 0 at lag 0"),
        ("mismatch/log_min", "nats", "smallest log(trainer / generator) of a token"),
        ("mismatch/log_max", "nats", "largest log(trainer / generator) of a token"),
        ("mismatch/log_p{percent}", "nats", "percentiles 01, 05, 50, 95, 99 of log(trainer / generator), raw"),
        (
            "mismatch/outside_band_fraction",
            "share",
            "tokens whose RAW ratio is outside the band",
        ),
        ("mismatch/applied_mean", "ratio", "APPLIED weight over accepted tokens: what training sees"),
        ("mismatch/applied_ess", "share", "effective sample size of the APPLIED weight"),
        ("mismatch/applied_chi2", "1", "mean squared APPLIED weight minus 1"),
        ("mismatch/capped_fraction", "share", "tokens whose weight the cap cut"),
        (
            "mismatch/fresh_ratio_error_max",
            "1",
            "largest abs(ratio - 1) of a lag-0 token; above 1e-4 a fault",
        ),
        ("mismatch/other_fingerprint_fraction", "share", "rows whose precision or engine is not the trainer's"),
    ),
)
BATCH = (
    *_metrics(
        "count",
        ("training/tokens", "tokens", "in the loss"),
        ("training/rows", "rows", "with at least one token in the loss"),
        ("training/optimizer_steps", "steps", "optimizer steps made"),
        ("training/optimizer_steps_masked", "steps", "not made because no token counted"),
        ("training/optimizer_steps_nonfinite", "steps", "not made because the gradient was not finite"),
        ("replay/rows", "rows", "used before and used again"),
    ),
    *_metrics(
        "value",
        ("training/row_weight_mean", "1", "mean weight from age; 1 unless down-weighting is on"),
        (
            "training/skipped_in_row",
            "steps",
            "optimizer steps not made since the last one that was",
        ),
        ("skipped_step", "0 or 1", "the training step changed no weight"),
        ("trainer/idle_fraction", "share", "of the time since the last step that the trainer waited"),
        (
            "trainer/publication_behind_seconds",
            "s",
            "checkpoint and transaction of the version before, beside the compute; only with overlap_publication",
        ),
    ),
    *_metrics("total", ("training/optimizer_steps_skipped_total", "steps", "optimizer steps not made since the start")),
)
REWARDS = (
    *_spread("critic/rewards", "reward", "rewards of the groups' usable members, as measured"),
    *_spread("critic/advantages", "1", "advantages of the trained rows"),
    *_metrics(
        "value",
        ("critic/rewards/std", "reward", "standard deviation over the trained rows"),
        (
            "critic/kl_in_reward",
            "reward",
            "mean divergence from the reference taken off the rewards",
        ),
        ("reward_by_task/{task}", "reward", "mean of the trained rows of one task"),
        ("reward_by_lag/{lag}", "reward", "mean of the trained rows of one policy lag"),
        (
            "reward_by_version/back_{versions}",
            "reward",
            "mean of the rows sampled that many versions before",
        ),
        ("group/reward_variance", "reward^2", "mean over groups of the variance inside the group"),
        ("group/zero_variance", "share", "groups whose rewards are all equal: they teach nothing"),
        ("group/all_right", "share", "groups whose rewards are all >= 1"),
        ("group/all_wrong", "share", "groups whose rewards are all <= 0"),
    ),
)
LAG = (
    *_spread("policy_lag", "training steps", "of the oldest trained token of a row, when the batch was built"),
    *_spread("policy_lag_from_issue", "training steps", "between a request's issue and the update its group is in"),
    *_metrics(
        "count",
        ("policy_lag/count_{lag}", "rows", "histogram of policy_lag"),
        ("policy_lag_from_issue/count_{lag}", "rows", "histogram of policy_lag_from_issue"),
        ("samples_per_version/back_{versions}", "segments", "sampled that many versions before the update"),
    ),
    *_spread("age_seconds", "s", "from the end of sampling to the update (clocks of two processes)"),
    *_metrics("value", ("age_seconds/from_issue_mean", "s", "from a request's issue to the update, mean")),
)
LENGTHS = (
    *_spread("response_length", "tokens", "completions of the trained rows"),
    *_spread("prompt_length", "tokens", "prompts of the trained rows"),
    *_metrics("value", ("response_length/clip_ratio", "share", "trained rows cut off by max_tokens")),
)
DROPS = (
    *_metrics(
        "count",
        ("dropped/{reason}", "rows", "dropped in this transaction, by reason"),
    ),
    *_metrics(
        "value",
        ("dropped_length/{reason}", "tokens", "mean completion length of the rows dropped for that reason"),
        ("dropped_reward/{reason}", "reward", "mean reward of the rows dropped for that reason"),
    ),
)
PROJECTED = (
    *_metrics(
        "value",
        ("time/{phase}_seconds", "s", "seconds of one phase of the step"),
        ("batch/groups", "groups", "in the batch, replayed ones not counted"),
        ("batch/trajectories", "rows", "in the batch, replayed ones too"),
        ("nonfinite_metrics", "metrics", "of this step that were not finite; a tag names them"),
        ("ledger/policy_lag_mean", "training steps", "of the used rows, from the ledger"),
        ("ledger/policy_lag_max", "training steps", "of the used rows, from the ledger"),
        ("switch/acks", "workers", "that proved the version"),
        ("switch/seconds", "s", "from the start of the switch to its activation"),
        ("switch/publish_to_live_seconds", "s", "from publication to activation (clocks of two processes)"),
    ),
    *_metrics("count", ("ledger/{decision}", "decisions", "since the step before: subject/decision/reason")),
    *_metrics(
        "total",
        ("ledger_total/{decision}", "decisions", "since the start of the run: subject/decision/reason"),
        ("policy/void_events_total", "events", "of the policy topic that were illegal where they stand"),
    ),
)
EVALUATION = (
    *_metrics(
        "value",
        ("evaluation/reward_mean", "reward", "mean of all answers, greedy and sampled; makes a version `best`"),
        ("evaluation/greedy_reward_mean", "reward", "mean of the most probable answers"),
        ("evaluation/sampled_reward_mean", "reward", "mean of the sampled answers"),
        (
            "evaluation/pass_at_{samples}",
            "share",
            "mean chance that one of so many samples has reward >= 1",
        ),
        ("evaluation/response_length_mean", "tokens", "of all answers"),
        ("evaluation/truncated_share", "share", "answers cut off by max_tokens"),
        ("evaluation/answers", "answers", "in the log"),
        ("evaluation/rewards_failed", "answers", "whose reward function failed; they are in no mean"),
    ),
)
SECTIONS: tuple[tuple[str, tuple[Metric, ...]], ...] = (
    ("The update", UPDATE),
    ("Trainer against generator", MISMATCH),
    ("The batch", BATCH),
    ("Rewards and groups", REWARDS),
    ("Age", LAG),
    ("Lengths", LENGTHS),
    ("What was dropped", DROPS),
    ("Evaluation", EVALUATION),
    ("Added for the experiment tracker", PROJECTED),
)
METRICS: tuple[Metric, ...] = tuple(metric for _, metrics in SECTIONS for metric in metrics)

_HEAD = """\
# Metrics

Made from `infra/metrics.py` by `python -m infra.metrics > docs/metrics.md`; a test keeps it up to date, and another
one fails for a name that is not in it.

A training step stores its metrics in StepCompleted in the ledger; the projector shows them in MLflow at the version
they made. Those of an evaluation are computed from the answers in `evaluations`. A part in braces stands for many
names. A *value* is of one step, a *count* adds up over steps, a *total* counts from the start of the run. What each
statistic of the update means: [objectives.md](objectives.md#statistics).
"""


def find(name: str) -> Metric | None:
    """The entry of a name; None when it is not registered.

    >>> find("policy_lag/count_3").unit
    'rows'
    >>> find("policy_lag/cuont_3") is None
    True
    """
    exact, patterns = _index()
    if name in exact:
        return exact[name]
    return next((metric for pattern, metric in patterns if pattern.fullmatch(name)), None)


def unregistered(names: Iterable[str]) -> list[str]:
    """Those that are not in the table, sorted."""
    return sorted({name for name in names if find(name) is None})


def markdown() -> str:
    """docs/metrics.md."""
    parts = [_HEAD]
    for title, metrics in SECTIONS:
        parts.append(f"\n## {title}\n\n| name | unit | kind | meaning |\n|---|---|---|---|\n")
        parts += [f"| `{m.name}` | {m.unit} | {m.kind} | {m.meaning} |\n" for m in metrics]
    return "".join(parts)


@cache
def _index() -> tuple[dict[str, Metric], tuple[tuple[re.Pattern[str], Metric], ...]]:
    exact = {metric.name: metric for metric in METRICS if "{" not in metric.name}
    patterns = tuple((_pattern(metric.name), metric) for metric in METRICS if "{" in metric.name)
    return exact, patterns


def _pattern(name: str) -> re.Pattern[str]:
    """A part in braces is a number where it is called so, and otherwise anything but nothing."""
    numbers = {"lag": r"\d+", "versions": r"\d+", "samples": r"\d+", "percent": r"\d\d"}
    pieces = re.split(r"\{(\w+)\}", name)
    return re.compile("".join(numbers.get(p, ".+") if i % 2 else re.escape(p) for i, p in enumerate(pieces)))


if __name__ == "__main__":
    sys.stdout.write(markdown())
