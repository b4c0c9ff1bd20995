"""What is measured beside the loss, in a form that adds up over micro-batches and ranks.

Guarantees that a metric of the step is the same however its rows were cut: a Tally holds sums and
maxima, never means. RAW numbers (before any cap or mask) and APPLIED ones have different names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from consumers.objective.corrections import Correction, Mismatch
from consumers.objective.inputs import LossInputs
from consumers.objective.kl import KlTerms, refuse_negative
from consumers.objective.options import Objective
from consumers.objective.ratios import Ratio
from consumers.objective.settings import ObjectiveSettings
from consumers.objective.shapes import ShapeError, spread_rows

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "loss": "the loss of the step",
        "tokens": "count; tokens in the mask",
        "rows": "count; rows with at least one token in the mask",
        "ppo_kl": "nats; mean of -log ratio over the denominator of the clip ratio",
        "ratio_mean": "ratio; mean of the clip ratio",
        "ratio_ess": "share in (0,1]; effective sample size of the clip ratio",
        "ratio_chi2": "mean of the squared clip ratio, minus 1",
        "ratio_k3": "nats; mean of r - 1 - log r",
        "log_ratio_min": "nats; smallest log clip ratio, before the clamp",
        "log_ratio_max": "nats; largest log clip ratio, before the clamp",
        "log_ratio_clamped_fraction": "share of tokens whose exponent was outside +-20",
        "clipfrac": "share of tokens the clip cuts: clipfrac_high + clipfrac_low",
        "clipfrac_high": "share of tokens with r > 1 + hi and A > 0",
        "clipfrac_low": "share of tokens with r < 1 - lo and A < 0",
        "clipfrac_dual": "share of tokens with r > c and A < 0",
        "clipfrac_delta": "share of tokens with r > delta and A < 0",
        "cispo_capped_fraction": "share of tokens with r above the cap",
        "cispo_floored_fraction": "share of tokens with r below the floor",
        "mismatch_raw_mean": "ratio; RAW weight prox/beh of the correction, before cap and mask",
        "mismatch_raw_ess": "share in (0,1]; of the RAW weight",
        "mismatch_raw_chi2": "mean of the squared RAW weight, minus 1",
        "mismatch_raw_k3": "nats; mean of x - 1 - log x of the RAW weight",
        "mismatch_log_min": "nats; smallest token log prox/beh",
        "mismatch_log_max": "nats; largest token log prox/beh",
        "mismatch_outside_band_fraction": "share of tokens whose RAW ratio is outside the band",
        "mismatch_applied_mean": "ratio; APPLIED weight over the accepted tokens",
        "mismatch_applied_ess": "share in (0,1]; of the APPLIED weight",
        "mismatch_applied_chi2": "mean of the squared APPLIED weight, minus 1",
        "mismatch_capped_fraction": "share of tokens whose weight the cap cut",
        "rejected_fraction": "share of tokens the correction's mask rejected",
        "kl_ref_k1": "nats; mean of k1 to the reference; may be negative",
        "kl_ref_k2": "nats; mean of k2 to the reference",
        "kl_ref_k3": "nats; mean of k3 to the reference",
        "kl_ref_clamped_fraction": "share of tokens outside +-10 nats of the reference",
        "entropy": "nats; mean entropy of the policy's next-token distribution",
    }
)
"""Every name step_metrics can return, with unit and meaning. Shares are of `tokens`."""

SUMS = (
    "loss", "tokens", "rows", "counted_tokens", "counted_rows", "kept_tokens", "aged_rows",
    "log_ratio", "ratio", "ratio_squared", "ratio_k3", "ratio_clamped",
    "clip_high", "clip_low", "clip_dual", "clip_delta", "cispo_capped", "cispo_floored",
    "raw", "raw_squared", "raw_k3", "outside", "applied", "applied_squared", "capped",
    "kl_tokens", "k1", "k2", "k3", "kl_clamped", "entropy_tokens", "entropy",
)  # fmt: skip
PEAKS = (
    "log_ratio", "minus_log_ratio", "mismatch_log", "minus_mismatch_log", "token_log_ratio_abs",
)  # fmt: skip

QUANTILES = (1, 5, 50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tally:
    """Sums and maxima over some rows. Add with `+`; over ranks all-reduce SUM and MAX."""

    sums_K: Tensor
    """float64 [len(SUMS)]"""
    peaks_K: Tensor
    """float64 [len(PEAKS)]; -inf where nothing was seen"""

    def __add__(self, other: Tally) -> Tally:
        return Tally(sums_K=self.sums_K + other.sums_K, peaks_K=torch.maximum(self.peaks_K, other.peaks_K))

    def named_sums(self) -> dict[str, float]:
        """The sums by name, on the host."""
        return dict(zip(SUMS, self.sums_K.tolist(), strict=True))

    def named_peaks(self) -> dict[str, float]:
        """The maxima by name, on the host."""
        return dict(zip(PEAKS, self.peaks_K.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What the loss was made of, for its tally."""

    loss: Tensor
    counted_BT: Tensor
    ratio: Ratio
    mismatch: Mismatch
    correction: Correction
    kl: KlTerms | None


@torch.no_grad()
def tally_of(inputs: LossInputs, settings: ObjectiveSettings, parts: Parts) -> Tally:
    """Sums of one micro-batch, float64, over the mask unless the name says otherwise."""
    mask_BT, ratio, correction = inputs.mask_BT, parts.ratio, parts.correction
    live_B = mask_BT.any(dim=1)

    def total(values_BT: Tensor) -> Tensor:
        return torch.where(mask_BT, values_BT, 0).sum(dtype=torch.float64)

    x_BT, w_BT = ratio.ratio_BT.double(), correction.raw_BT.double()
    applied_BT = torch.where(correction.keep_BT, correction.weight_BT, 0).double()
    sums = {
        "loss": parts.loss,
        "tokens": total(mask_BT),
        "rows": live_B.sum(),
        "counted_tokens": parts.counted_BT.sum(),
        "counted_rows": parts.counted_BT.any(dim=1).sum(),
        "kept_tokens": total(correction.keep_BT),
        "aged_rows": (live_B & (inputs.policy_lag_B >= 1)).sum(),
        "log_ratio": total(ratio.exponent_BT),
        "ratio": total(x_BT),
        "ratio_squared": total(x_BT.square()),
        "ratio_k3": total(x_BT - 1 - ratio.exponent_BT),
        "ratio_clamped": total(ratio.clamped_BT),
        "raw": total(w_BT),
        "raw_squared": total(w_BT.square()),
        "raw_k3": total(w_BT - 1 - w_BT.log()),
        "outside": total(correction.outside_BT),
        "applied": total(applied_BT),
        "applied_squared": total(applied_BT.square()),
        "capped": total(correction.capped_BT),
        **{name: total(flags) for name, flags in _clip_flags(inputs, settings, ratio).items()},
    }
    if parts.kl is not None:
        sums |= {
            "kl_tokens": total(mask_BT),
            "k1": total(parts.kl.k1_BT),
            "k2": total(parts.kl.k2_BT),
            "k3": total(parts.kl.k3_BT),
            "kl_clamped": total(parts.kl.clamped_BT),
        }
    if inputs.entropy_BT is not None:
        sums |= {"entropy_tokens": total(mask_BT), "entropy": total(inputs.entropy_BT)}
    peaks = {
        "log_ratio": ratio.log_ratio_BT,
        "minus_log_ratio": -ratio.log_ratio_BT,
        "mismatch_log": parts.mismatch.log_ratio_BT,
        "minus_mismatch_log": -parts.mismatch.log_ratio_BT,
        "token_log_ratio_abs": ratio.token_log_ratio_BT.abs(),
    }
    zero = torch.zeros((), dtype=torch.float64, device=mask_BT.device)
    return Tally(
        sums_K=torch.stack([sums.get(name, zero).to(zero) for name in SUMS]),
        peaks_K=torch.stack([_peak(peaks[name], mask_BT).to(zero) for name in PEAKS]),
    )


def step_metrics(tally: Tally, settings: ObjectiveSettings) -> dict[str, float]:
    """The metrics of a step from the sum of its tallies; names and units in METRICS.

    Names that do not apply are left out: clip fractions of an objective that does not clip, the
    divergence without a reference, and everything but counts when no token was counted. Raises
    NegativeDivergence.

    Source: ess Kish 1965; chi2 and k3 as estimators of the divergences of the same names.
    Departure: none.
    """
    s, peak = tally.named_sums(), tally.named_peaks()
    tokens = s["tokens"]
    metrics = {"loss": s["loss"], "tokens": tokens, "rows": s["rows"]}
    if tokens == 0:
        return metrics
    metrics |= {
        "ppo_kl": -s["log_ratio"] / tokens,
        **_weight_metrics("ratio", s["ratio"], s["ratio_squared"], tokens),
        "ratio_k3": s["ratio_k3"] / tokens,
        "log_ratio_min": -peak["minus_log_ratio"],
        "log_ratio_max": peak["log_ratio"],
        "log_ratio_clamped_fraction": s["ratio_clamped"] / tokens,
        **_weight_metrics("mismatch_raw", s["raw"], s["raw_squared"], tokens),
        "mismatch_raw_k3": s["raw_k3"] / tokens,
        "mismatch_log_min": -peak["minus_mismatch_log"],
        "mismatch_log_max": peak["mismatch_log"],
        "mismatch_outside_band_fraction": s["outside"] / tokens,
        "mismatch_capped_fraction": s["capped"] / tokens,
        "rejected_fraction": (tokens - s["kept_tokens"]) / tokens,
    }
    if s["kept_tokens"] > 0:
        kept = s["kept_tokens"]
        metrics |= _weight_metrics("mismatch_applied", s["applied"], s["applied_squared"], kept)
    metrics |= _clip_metrics(s, settings)
    if s["kl_tokens"] > 0:
        for name in ("k1", "k2", "k3"):
            metrics[f"kl_ref_{name}"] = s[name] / s["kl_tokens"]
        metrics["kl_ref_clamped_fraction"] = s["kl_clamped"] / s["kl_tokens"]
        refuse_negative("kl_ref_k2", metrics["kl_ref_k2"])
        refuse_negative("kl_ref_k3", metrics["kl_ref_k3"])
    if s["entropy_tokens"] > 0:
        metrics["entropy"] = s["entropy"] / s["entropy_tokens"]
    return metrics


def percentiles(values_N: Tensor) -> dict[str, float]:
    """Percentiles 1, 5, 50, 95, 99 of collected values, as {"p01": ...}; {} for none.

    values_N: float [N], e.g. the joined log_ratio_N of a step. Linear between neighbours. Raises
    ShapeError.
    """
    if values_N.dim() != 1 or not values_N.is_floating_point():
        raise ShapeError(f"values must be float [N], is {values_N.dtype} {list(values_N.shape)}")
    if len(values_N) == 0:
        return {}
    ordered_N = values_N.detach().double().sort().values  # torch.quantile stops at 2^24 values
    found = {}
    for quantile in QUANTILES:
        place = quantile / 100 * (len(ordered_N) - 1)
        low, high = float(ordered_N[math.floor(place)]), float(ordered_N[math.ceil(place)])
        found[f"p{quantile:02d}"] = low + (high - low) * (place - math.floor(place))
    return found


def _clip_flags(inputs: LossInputs, settings: ObjectiveSettings, ratio: Ratio) -> dict[str, Tensor]:
    r_BT = ratio.ratio_BT
    a_BT = spread_rows("advantages", inputs.advantages, inputs.mask_BT, r_BT.dtype)
    if settings.objective is Objective.CISPO:
        return {
            "cispo_capped": r_BT > settings.cispo_cap,
            "cispo_floored": r_BT < settings.cispo_floor,
        }
    if settings.objective is Objective.REINFORCE:
        return {}
    flags = {
        "clip_high": (r_BT > 1 + settings.clip_high) & (a_BT > 0),
        "clip_low": (r_BT < 1 - settings.clip_low) & (a_BT < 0),
    }
    if settings.dual_clip is not None:
        flags["clip_dual"] = (r_BT > settings.dual_clip) & (a_BT < 0)
    if settings.two_sided_delta is not None:
        flags["clip_delta"] = (r_BT > settings.two_sided_delta) & (a_BT < 0)
    return flags


def _clip_metrics(s: Mapping[str, float], settings: ObjectiveSettings) -> dict[str, float]:
    tokens = s["tokens"]
    if settings.objective is Objective.CISPO:
        return {
            "cispo_capped_fraction": s["cispo_capped"] / tokens,
            "cispo_floored_fraction": s["cispo_floored"] / tokens,
        }
    if settings.objective is Objective.REINFORCE:
        return {}
    metrics = {
        "clipfrac": (s["clip_high"] + s["clip_low"]) / tokens,
        "clipfrac_high": s["clip_high"] / tokens,
        "clipfrac_low": s["clip_low"] / tokens,
    }
    if settings.dual_clip is not None:
        metrics["clipfrac_dual"] = s["clip_dual"] / tokens
    if settings.two_sided_delta is not None:
        metrics["clipfrac_delta"] = s["clip_delta"] / tokens
    return metrics


def _weight_metrics(prefix: str, total: float, squared: float, count: float) -> dict[str, float]:
    """Mean, effective sample size as a share, chi-squared divergence of a weight."""
    return {
        f"{prefix}_mean": total / count,
        f"{prefix}_ess": total**2 / (count * squared) if squared > 0 else 0.0,
        f"{prefix}_chi2": squared / count - 1,
    }


def _peak(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    masked_BT = torch.where(mask_BT, values_BT, -math.inf)
    return masked_BT.max() if masked_BT.numel() else masked_BT.new_tensor(-math.inf)
