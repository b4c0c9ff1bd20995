"""Settings: ranges, presets, and which pairs are refused at start-up."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from consumers.objective import (
    PRESETS,
    Aggregation,
    CorrectionKind,
    IllegalCombination,
    InvalidSetting,
    KlEstimator,
    KlPlacement,
    Objective,
    ObjectiveSettings,
    RatioDenominator,
    RatioLevel,
    check_legal,
    preset,
)

WEIGHTS = [
    CorrectionKind.TOKEN_TIS,
    CorrectionKind.SEQUENCE_TIS,
    CorrectionKind.ICEPOP,
    CorrectionKind.MIS,
    CorrectionKind.GEOMETRIC_TOKEN_TIS,
]
MASKS = [CorrectionKind.GEOMETRIC, CorrectionKind.TOKEN_MASK, CorrectionKind.SEQUENCE_MASK]


def legal(settings: ObjectiveSettings, *, steps: int = 1, max_lag: int = 2, differs: bool = False) -> tuple[str, ...]:
    return check_legal(settings, epochs_times_minibatches=steps, max_lag=max_lag, fingerprint_differs=differs)


@pytest.mark.parametrize("objective", [Objective.PPO_CLIP, Objective.CISPO])
@pytest.mark.parametrize("correction", WEIGHTS)
def test_a_weight_with_the_behaviour_denominator_is_refused(objective: Objective, correction: CorrectionKind) -> None:
    settings = ObjectiveSettings(objective=objective, correction=correction)
    with pytest.raises(IllegalCombination, match="count it twice") as caught:
        legal(settings)
    assert caught.value.pair == (f"{objective} with denominator behaviour", f"correction {correction}")

    legal(replace(settings, denominator=RatioDenominator.PROXIMAL))
    legal(replace(settings, objective=Objective.REINFORCE))


@pytest.mark.parametrize("correction", MASKS)
@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("denominator", list(RatioDenominator))
def test_masks_go_with_everything(
    correction: CorrectionKind, objective: Objective, denominator: RatioDenominator
) -> None:
    legal(ObjectiveSettings(objective=objective, denominator=denominator, correction=correction))


@pytest.mark.parametrize(("max_lag", "differs"), [(1, False), (0, True)])
def test_the_proximal_denominator_alone_would_leave_the_stored_numbers_unused(max_lag: int, differs: bool) -> None:
    settings = ObjectiveSettings(denominator=RatioDenominator.PROXIMAL)
    with pytest.raises(IllegalCombination, match="ratio would be 1: stored behaviour log-probabilities unused"):
        legal(settings, max_lag=max_lag, differs=differs)

    legal(settings, max_lag=0, differs=False)
    legal(settings, steps=4, max_lag=max_lag, differs=differs)
    legal(replace(settings, correction=CorrectionKind.TOKEN_TIS), max_lag=max_lag, differs=differs)


def test_reinforce_needs_a_correction_for_old_data() -> None:
    settings = ObjectiveSettings(objective=Objective.REINFORCE)
    with pytest.raises(IllegalCombination, match="reinforce with correction none"):
        legal(settings)
    assert legal(settings, max_lag=0) == ()
    assert legal(replace(settings, correction=CorrectionKind.TOKEN_TIS)) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_estimator": KlEstimator.K1}, "kl_placement loss cannot go with kl_estimator k1"),
        ({"kl_placement": KlPlacement.REWARD}, "kl_placement reward cannot go with kl_estimator k3"),
        (
            {"kl_placement": KlPlacement.REWARD, "kl_estimator": KlEstimator.K2},
            "kl_placement reward cannot go with kl_estimator k2",
        ),
        (
            {
                "kl_placement": KlPlacement.REWARD,
                "kl_estimator": KlEstimator.K1,
                "kl_importance_weighted": True,
            },
            "kl_importance_weighted",
        ),
    ],
)
def test_biased_divergences_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(IllegalCombination, match=message):
        legal(ObjectiveSettings(kl_coefficient=0.1, **changes))
    legal(ObjectiveSettings(kl_coefficient=0.0, **changes))


def test_legal_divergences_pass() -> None:
    reward = ObjectiveSettings(kl_coefficient=0.1, kl_placement=KlPlacement.REWARD, kl_estimator=KlEstimator.K1)
    assert legal(reward) == ()
    assert "biased on older data" in legal(ObjectiveSettings(kl_coefficient=0.1))[0]
    assert legal(ObjectiveSettings(kl_coefficient=0.1, kl_importance_weighted=True)) == ()
    assert legal(ObjectiveSettings(kl_coefficient=0.1), max_lag=0) == ()


def test_a_constant_aggregation_needs_its_constant() -> None:
    with pytest.raises(IllegalCombination, match="constant_length"):
        legal(preset("dr_grpo"))
    assert legal(preset("dr_grpo", constant_length=64)) == ()


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (ObjectiveSettings(level=RatioLevel.SEQUENCE_SUM), {}, "sequence_sum"),
        (preset("gspo"), {}, "presumes lag 0"),
        (ObjectiveSettings(), {"steps": 4}, "drift inside a training step is not covered by max_lag"),
        (
            ObjectiveSettings(objective=Objective.REINFORCE, correction=CorrectionKind.GEOMETRIC),
            {},
            "only rejects",
        ),
        (
            ObjectiveSettings(denominator=RatioDenominator.PROXIMAL, correction=CorrectionKind.GEOMETRIC),
            {},
            "only rejects",
        ),
        (ObjectiveSettings(objective=Objective.CISPO, dual_clip=3.0), {}, "dual_clip has no effect"),
        (ObjectiveSettings(objective=Objective.CISPO, two_sided_delta=3.0), {}, "two_sided_delta has no effect"),
        (ObjectiveSettings(dual_clip=3.0, two_sided_delta=2.0), {}, "smaller bound binds"),
        (ObjectiveSettings(constant_length=5), {}, "constant_length has no effect"),
    ],
)
def test_legal_but_surprising_settings_are_warned_about(settings: ObjectiveSettings, options: dict, words: str) -> None:
    """C49 for the drift inside a training step; the others by their words."""
    warnings = legal(settings, **options)

    assert len(warnings) == 1
    assert words in warnings[0]


def test_fresh_rows_need_no_warning_about_narrow_bounds() -> None:
    assert legal(preset("gspo"), max_lag=0) == ()


@pytest.mark.parametrize("name", ["grpo", "dapo", "decoupled"])
def test_presets_are_legal_at_the_default_lag(name: str) -> None:
    assert legal(PRESETS[name]) == ()


def test_presets_are_what_their_names_say() -> None:
    assert set(PRESETS) == {"grpo", "dr_grpo", "dapo", "gspo", "decoupled"}
    grpo = PRESETS["grpo"]
    assert (grpo.clip_low, grpo.clip_high, grpo.dual_clip, grpo.aggregation) == (0.2, 0.2, 3.0, "token_mean")
    gspo = PRESETS["gspo"]
    assert (gspo.level, gspo.clip_low, gspo.clip_high) == ("sequence", 3e-4, 4e-4)
    assert gspo.aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN
    assert (PRESETS["dapo"].clip_low, PRESETS["dapo"].clip_high) == (0.2, 0.28)
    assert PRESETS["decoupled"].denominator is RatioDenominator.PROXIMAL


def test_an_unknown_preset_or_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidSetting, match='is "ppo"'):
        preset("ppo")
    with pytest.raises(InvalidSetting, match="has no field clip"):
        preset("grpo", clip=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"correction_cap": 0.0},
        {"band_low": -0.1},
        {"band_low": 3.0},
        {"min_group": 1},
        {"constant_length": 0},
        {"kl_coefficient": -0.1},
        {"entropy_coefficient": -0.1},
        {"advantage_epsilon": -1e-4},
        {"zero_variance_tolerance": -1.0},
        {"objective": "ppo"},
        {"denominator": "behaviour"},
    ],
    ids=str,
)
def test_a_value_outside_its_range_is_refused_by_name(changes: dict) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(changes))):
        ObjectiveSettings(**changes)


@pytest.mark.parametrize(("steps", "max_lag"), [(0, 1), (1, -1)])
def test_an_impossible_run_is_refused(steps: int, max_lag: int) -> None:
    with pytest.raises(InvalidSetting):
        legal(ObjectiveSettings(), steps=steps, max_lag=max_lag)


def test_settings_and_errors_survive_pickling() -> None:
    assert pickle.loads(pickle.dumps(PRESETS["gspo"])) == PRESETS["gspo"]
    error = IllegalCombination("a", "b", "because")
    assert str(pickle.loads(pickle.dumps(error))) == "a cannot go with b: because"
