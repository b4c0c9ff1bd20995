"""What is worth a look in the latest training steps, in words. Pure; nothing is ever decided by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from infra.config_trainer import AlarmsSection

_ESS = ("mismatch/applied_ess", "actor/ratio_ess")


def alarms(recent: Iterable[Mapping[str, float]], limits: AlarmsSection | None = None) -> list[str]:
    """One sentence for each limit that the latest steps break; what it usually means, and what to look at.

    recent: metrics of training steps, oldest first; the last `window_steps` are looked at. A metric that is not
    there raises no alarm.

    >>> alarms([{"actor/ratio_ess": 0.2}])
    ['effective sample size 0.20 < 0.5: the data is too old or the engines disagree; look at policy_lag and mismatch']
    """
    limits = limits or AlarmsSection()
    window = list(recent)[-limits.window_steps :]
    found = []
    ess = [value for name in _ESS if (value := _mean(window, name)) is not None]
    if ess and min(ess) < limits.ess_low:
        found.append(
            f"effective sample size {min(ess):.2f} < {limits.ess_low:g}: the data is too old or the engines disagree; "
            "look at policy_lag and mismatch"
        )
    found += _entropy(window, limits)
    clipped = _mean(window, "actor/pg_clipfrac")
    if clipped is not None and clipped > limits.clip_fraction_high:
        found.append(
            f"clip fraction {clipped:.2f} > {limits.clip_fraction_high:g}: most of the gradient is cut away; lower "
            "trainer.max_lag or the learning rate, or widen the clip"
        )
    norm = _mean(window, "actor/grad_norm")
    if norm is not None and norm > limits.grad_norm_high:
        found.append(
            f"gradient norm {norm:.3g} > {limits.grad_norm_high:g} before clipping: steps have a direction and no "
            "size; lower the learning rate"
        )
    equal = _mean(window, "group/zero_variance")
    if equal is not None and equal > limits.zero_variance_high:
        found.append(
            f"{equal:.0%} of the groups have equal rewards: next to nothing is learnt; choose other prompts, or set "
            "trainer.filter_zero_variance"
        )
    skipped = _last(window, "training/skipped_in_row")
    if skipped:
        found.append(f"the last {skipped:.0f} optimizer steps were not made: nothing counted, or no finite gradient")
    return found


def _entropy(window: Sequence[Mapping[str, float]], limits: AlarmsSection) -> list[str]:
    values = [step["actor/entropy"] for step in window if "actor/entropy" in step]
    if not values:
        return []
    mean = sum(values) / len(values)
    if mean < limits.entropy_low:
        words = f"entropy {mean:.3f} nats < {limits.entropy_low:g}: the policy has collapsed onto single answers; "
        return [words + "raise the temperature, lower the learning rate, or add an entropy bonus"]
    lost = 1 - values[-1] / values[0] if values[0] > 0 else 0.0
    if lost > limits.entropy_fall:
        limit = f"limit {limits.entropy_fall:.0%}"
        return [f"entropy fell by {lost:.0%} within {len(values)} steps ({limit}): the policy is collapsing"]
    return []


def _mean(window: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [step[name] for step in window if name in step]
    return sum(values) / len(values) if values else None


def _last(window: Sequence[Mapping[str, float]], name: str) -> float | None:
    return window[-1].get(name) if window else None
