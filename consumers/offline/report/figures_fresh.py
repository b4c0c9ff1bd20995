"""Plots of how old what was trained was, and of what was not trained: lag, age, who sampled, drops. Pure."""

from __future__ import annotations

from consumers.offline.report.bins import Histogram, parts, places, tidy
from consumers.offline.report.figure import Axis, Bars, Figure, Heat, Number, Section, Series, Table
from consumers.offline.report.reading import RunReading
from consumers.offline.report.steps import Steps

TRAJECTORIES = Axis(label="trajectories", unit="")
_HEAT_COLUMNS = 120
_HEAT_ROWS = 10
"""versions back that have a row of their own; older ones share the last"""
_SHOWN_LAGS = 24


def freshness(reading: RunReading, steps: Steps, max_lag: int | None) -> Section:
    """How old it was."""
    limit = "" if max_lag is None else f" The limit of this run is {max_lag}."
    return Section(
        id="freshness",
        title="Freshness",
        lead="Policy lag counts training steps between the weights that sampled a trajectory's oldest token and the "
        f"weights it updated; age counts seconds from the end of sampling to the update.{limit}",
        parts=[
            _lags(reading), _ages(reading),
            steps.curves(
                "lag", "Policy lag by version", "From sampling, and from the request's issue.",
                Axis(label="policy lag", unit="training steps"),
                [
                    steps.line("mean", "policy_lag/mean"), steps.line("largest", "policy_lag/max", 1),
                    steps.line("mean, from issue", "policy_lag_from_issue/mean", 3),
                ],
                zero=True, lines=() if max_lag is None else ((float(max_lag), "limit"),),
            ),
            steps.curves(
                "age", "Age by version", "Sampled to consumed; the band is youngest to oldest row of a batch.",
                Axis(label="age", unit="s"),
                [
                    steps.band("youngest to oldest", "age_seconds/min", "age_seconds/max"),
                    steps.line("mean", "age_seconds/mean"),
                    steps.line("mean, from issue", "age_seconds/from_issue_mean", 3),
                ], zero=True,
            ),
            _heat(reading, steps),
        ],
    )  # fmt: skip


def _lags(reading: RunReading) -> Bars:
    lags = reading.ledger.lags
    shown = list(range(max(lags, default=-1) + 1))[:_SHOWN_LAGS]
    values: list[Number] = [float(lags.get(lag, 0)) for lag in shown]
    labels = [str(lag) for lag in shown]
    if beyond := sum(count for lag, count in lags.items() if lag >= _SHOWN_LAGS):
        labels, values = [*labels, f"{_SHOWN_LAGS}+"], [*values, float(beyond)]
    return Bars(
        id="lag-histogram", title="Policy lag of what was trained", note="Every use of a trajectory counts.",
        x=Axis(label="policy lag", unit="training steps"), y=TRAJECTORIES, labels=labels,
        series=[Series(name="trajectories", values=values)], empty="nothing was trained yet",
    )  # fmt: skip


def _ages(reading: RunReading) -> Bars:
    ages = reading.rows.ages
    shown = ages.filled()
    note = "Seconds from the end of sampling to the update, first uses."
    middle, high = ages.quantile(0.5), ages.quantile(0.95)
    if middle is not None and high is not None:
        note += f" Half are at most {middle:.3g} s old, 95 % at most {high:.3g} s."
    if ages.below_zero:
        note += f" {ages.below_zero} were negative: the clocks of two machines disagree."
    return Bars(
        id="age-histogram", title="Age of what was trained", note=note, x=Axis(label="age", unit="s"), y=TRAJECTORIES,
        labels=[f"{tidy((i + 1) * ages.width):g}" for i in range(shown)],
        series=[Series(name="trajectories up to that age", values=ages.weights[:shown])], bin_width=ages.width,
        empty="nothing was trained yet",
    )  # fmt: skip


def _heat(reading: RunReading, steps: Steps) -> Heat:
    met, versions = reading.rows.met, reading.ledger.versions
    columns = parts(len(versions), _HEAT_COLUMNS)
    size = len(columns[0]) if columns else 1
    place = dict(zip(versions, places(columns), strict=True))
    oldest = max((back for _, back in met), default=0)
    names = [str(back) for back in range(min(oldest, _HEAT_ROWS) + 1)]
    if oldest > _HEAT_ROWS:
        names[-1] += " or more"
    counts = [[0.0] * len(columns) for _ in names]
    for (version, back), count in met.items():
        column = place[version]
        counts[max(0, min(back, _HEAT_ROWS))][column] += count / len(columns[column])
    return Heat(
        id="heat", title="Sampled by which version, trained at which", width="full",
        note="Trajectories of an update that were sampled, in part or whole, that many versions before it. Row 0 is "
        "on-policy." + ("" if size == 1 else f" A column is the mean over {size} updates."),
        x=Axis(label="trained at policy version", unit=""), y=Axis(label="sampled", unit="versions before"),
        labels=[_range(versions[part[0]], versions[part[-1]]) for part in columns],
        rows=[Series(name=f"{names[back]} back", values=list(map(tidy, row))) for back, row in enumerate(counts)],
        empty="nothing was trained yet",
    )  # fmt: skip


def _range(first: int, last: int) -> str:
    return f"trained at {first}" if first == last else f"trained at {first}-{last}"


# ---------------------------------------------------------------------- drops


def drops(reading: RunReading, steps: Steps) -> Section:
    """What was not trained, and whether it differs from what was."""
    ledger = reading.ledger
    names = sorted(ledger.dropped, key=lambda name: (-ledger.dropped[name].rows, name))
    none = "nothing was dropped"
    return Section(
        id="drops",
        title="What was dropped",
        lead="Every trajectory is trained or dropped for one reason. Dropping what is late drops what is long, so both "
        "sides are compared: a difference in length or reward between them is a bias of the training data.",
        parts=[
            Bars(
                id="drops-by-reason", title="Dropped trajectories by reason", note="First decisions, whole run.",
                x=Axis(label="reason", unit=""), y=TRAJECTORIES, labels=names,
                series=[Series(name="trajectories", values=[float(ledger.dropped[n].rows) for n in names], tone=1)],
                empty=none, lies=True,
            ),
            _drop_share(steps),
            _length_bias(reading, none),
            _bias_table(reading, names),
            _group_table(reading),
        ],
    )  # fmt: skip


def _drop_share(steps: Steps) -> Figure:
    ledger = steps.ledger

    def share(part: range) -> float | None:
        dropped = sum(ledger.dropped_before[i] for i in part)
        decided = dropped + sum(ledger.trajectories[i] for i in part)
        return dropped / decided if decided else None

    series = [Series(name="dropped", values=steps.each(share), tone=1)] if ledger.dropped else []
    return steps.curves(
        "drop-share", "Dropped share by version", "Of what was decided since the version before.",
        Axis(label="dropped", unit="share"), series, zero=True, empty="nothing was dropped",
    )  # fmt: skip


def _length_bias(reading: RunReading, none: str) -> Figure:
    trained, dropped = reading.ledger.trained_lengths, reading.ledger.dropped_lengths
    for one, other in ((trained, dropped), (dropped, trained)):
        while one.width < other.width:
            one.reach(one.width * len(one.weights))
    shown = max(trained.filled(), dropped.filled())
    first = next((i for i in range(shown) if trained.weights[i] or dropped.weights[i]), 0)
    width = int(trained.width)
    return Bars(
        id="length-bias", title="Length: dropped against trained", note="Each side adds up to 1.",
        x=Axis(label="completion", unit="tokens"), y=Axis(label="share", unit="0-1"),
        labels=[_lengths(i, width) for i in range(first, shown)],
        series=[
            Series(name="trained", values=_shares(trained, first, shown)),
            Series(name="dropped", values=_shares(dropped, first, shown), tone=1),
        ],
        empty=none,
    )  # fmt: skip


def _lengths(index: int, width: int) -> str:
    return str(index) if width == 1 else f"{index * width}-{(index + 1) * width - 1}"


def _shares(lengths: Histogram, first: int, shown: int) -> list[Number]:
    total = lengths.total
    return [tidy(weight / total) if total else None for weight in lengths.weights[first:shown]]


def _bias_table(reading: RunReading, names: list[str]) -> Table:
    ledger = reading.ledger
    total = ledger.trained.rows + ledger.dropped_rows
    rows = []
    for name, tally in (("trained", ledger.trained), *((name, ledger.dropped[name]) for name in names)):
        share = f"{tally.rows / total:.1%}" if total else "-"
        rows.append((name, f"{tally.rows:,}", share, _number(tally.mean_length), _number(tally.mean_reward)))
    return Table(
        title="Trained and dropped compared", head=("", "trajectories", "share", "mean tokens", "mean reward"),
        rows=rows, width="half", numeric=(1, 2, 3, 4),
    )  # fmt: skip


def _group_table(reading: RunReading) -> Table:
    groups = sorted(reading.ledger.groups.items(), key=lambda item: (item[0][0] == "dropped", -item[1]))
    rows = [(f"{decision} {reason}".strip(), f"{count:,}") for (decision, reason), count in groups if count]
    if reading.ledger.refused_records:
        rows.append(("records that could not be decoded", f"{reading.ledger.refused_records:,}"))
    return Table(
        title="Groups by decision", head=("", "groups"), rows=rows, is_folded=True, numeric=(1,),
        note="A group is dropped as lost or run_ended also when no trajectory of it ever came.",
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
