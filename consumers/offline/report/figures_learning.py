"""Plots of what was learnt and of the update itself: reward, evaluation, groups, ratios, clipping, ESS. Pure."""

from __future__ import annotations

import bisect
from dataclasses import replace

from consumers.offline.report.bins import places, tidy
from consumers.offline.report.figure import Axis, Curves, Figure, Number, Quote, Section, Series
from consumers.offline.report.reading import RunReading
from consumers.offline.report.steps import Steps

REWARD = Axis(label="reward", unit="")
SHARE = Axis(label="share", unit="0-1")
NATS = Axis(label="log ratio", unit="nats")
_SHOWN_CHARACTERS = 400


def learning(reading: RunReading, steps: Steps) -> Section:
    """Did it learn."""
    return Section(
        id="learning",
        title="Learning",
        lead="Reward of what was trained, and of held-out prompts where the run was evaluated. Reward is as measured, "
        "before any normalisation.",
        parts=[_reward(reading, steps), *_groups(steps), *_health(steps)],
        quotes=_quotes(reading),
    )


def _reward(reading: RunReading, steps: Steps) -> Curves:
    """Version 0 was made by no step, but may have been evaluated: it has a place of its own."""
    batch = steps.line("mean reward of the batch", "critic/rewards/mean")
    series = [
        replace(batch, values=[None, *batch.values]),
        *[
            Series(name=f"evaluation, {word}", values=_evaluated(reading, steps, greedy), kind="points", tone=tone)
            for word, greedy, tone in (("greedy", True, 1), ("sampled", False, 2))
        ],
    ]
    note = "The batch is what the policy of one or a few versions before answered."
    if not reading.evaluations:
        note += " The log holds no evaluations."
    curves = steps.curves("reward", "Reward and evaluation by version", note, REWARD, series, width="full", zero=True)
    return replace(curves, places=[0.0, *steps.places], labels=["version 0", *steps.labels])


def _evaluated(reading: RunReading, steps: Steps, greedy: bool) -> list[Number]:
    """Mean of the evaluated versions at each place, version 0 first; others count at the place at or after them."""
    versions = reading.ledger.versions
    sums: dict[int, tuple[float, int]] = {}
    at = places(steps.parts)
    for (is_greedy, version), scores in reading.evaluations.items():
        if is_greedy is not greedy or scores.mean is None:
            continue
        after = min(bisect.bisect_left(versions, version), len(versions) - 1)
        place = 0 if version == 0 or not versions else 1 + at[after]
        total, count = sums.get(place, (0.0, 0))
        sums[place] = total + scores.mean, count + 1
    return [tidy(sums[p][0] / sums[p][1]) if p in sums else None for p in range(1 + len(steps.places))]


def _groups(steps: Steps) -> list[Figure]:
    return [
        steps.curves(
            "groups", "Groups that teach nothing", "A group whose rewards are all equal has no advantage.", SHARE,
            [
                steps.line("all right", "group/all_right"), steps.line("all wrong", "group/all_wrong", 1),
                steps.line("all equal", "group/zero_variance", 3),
            ], zero=True,
        ),
        steps.curves(
            "lengths", "Length of completions", "Of the trained rows; a rise without reward is a warning.",
            Axis(label="completion", unit="tokens"),
            [
                steps.line("mean", "response_length/mean"), steps.line("longest", "response_length/max", 3),
            ], zero=True,
        ),
    ]  # fmt: skip


def _health(steps: Steps) -> list[Figure]:
    return [
        steps.curves(
            "entropy", "Entropy", "A steady fall to 0 is collapse.", Axis(label="entropy", unit="nats"),
            [steps.line("entropy", "actor/entropy")], width="third", zero=True,
        ),
        steps.curves(
            "kl", "Divergence", "From the policy that sampled, and from the reference where there is one.",
            Axis(label="KL", unit="nats"),
            [steps.line("to what sampled", "actor/ppo_kl"), steps.line("to the reference (k3)", "actor/kl_ref_k3", 1)],
            width="third",
        ),
        steps.curves(
            "gradient", "Gradient norm", "Before clipping, mean over the optimizer steps.", Axis(label="norm", unit=""),
            [steps.line("gradient norm", "actor/grad_norm")], width="third", zero=True,
        ),
    ]  # fmt: skip


def update(steps: Steps) -> Section:
    """How far the update had to reach."""
    return Section(
        id="update",
        title="The update",
        lead="How far the policy that learnt was from the one that sampled, and what the objective did about it. "
        "Percentiles are raw: before any clamp, clip, cap or mask.",
        parts=[
            _quantiles(steps, "ratio", "Clip ratio", "actor/log_ratio_", "log of current over denominator, per token."),
            _quantiles(
                steps, "mismatch", "Trainer over generator", "mismatch/log_",
                "The same weights compute it on both sides at lag 0: there the rest is engine and precision.",
            ),
            steps.curves(
                "clip", "Clip fraction", "Tokens where the clip binds.", SHARE,
                [
                    steps.line("all", "actor/pg_clipfrac"),
                    steps.line("high (advantage > 0)", "actor/clipfrac_high", 1),
                    steps.line("low (advantage < 0)", "actor/clipfrac_low", 2),
                ], zero=True,
            ),
            steps.curves(
                "ess", "Effective sample size",
                "1: every token counts alike. It falls before the reward does.", Axis(label="ESS", unit="share"),
                [
                    steps.line("clip ratio", "actor/ratio_ess"),
                    steps.line("applied correction", "mismatch/applied_ess", 1),
                ], zero=True, top=1.0,
            ),
        ],
    )  # fmt: skip


def _quantiles(steps: Steps, id_: str, title: str, prefix: str, note: str) -> Curves:
    return steps.curves(
        id_, f"{title}: percentiles", note, NATS,
        [
            steps.band("1 to 99 %", f"{prefix}p01", f"{prefix}p99"),
            steps.band("5 to 95 %", f"{prefix}p05", f"{prefix}p95"),
            steps.line("median", f"{prefix}p50"),
        ], lines=((0.0, ""),),
    )  # fmt: skip


def _quotes(reading: RunReading) -> list[Quote]:
    best, worst = reading.rows.texts()
    found = []
    for word, texts in (("best", best), ("worst", worst)):
        for text in texts:
            under = ", ".join(map(str, text.sampled_under))
            head = (
                f"{word}: reward {text.reward:g}, {text.tokens} tokens, {text.finish_reason}, sampled under version "
                f"{under}: {text.trajectory_id}"
            )
            prompt = reading.prompts.get(text.group_id, "")
            found.append(Quote(head=head, prompt=_cut(prompt), text=_cut(text.text)))
    return found


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
