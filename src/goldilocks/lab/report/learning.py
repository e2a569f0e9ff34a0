"""What was learnt: accuracy and reward by cost, accuracy by the columns of the data, and GSPO's importance ratios.

The ratio of a sequence is shown by quantile, with how often it is clipped on either side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import altair as alt

from goldilocks.dotted_keys import value_at
from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section, run_colour
from goldilocks.lab.report.run import Run
from goldilocks.runs.costs import COSTS
from goldilocks.runs.history import History, Series, belief_name, metric_name, validated_source
from goldilocks.runs.history import by_column as accuracies_by_column
from goldilocks.sheet import Sheet

ROW, MARGIN = 22, 60  # pixels of a value in a heat map, and of the axis below
SHOWN_BY_COLUMN = (("accuracy", "Accuracy", metric_name), ("belief", "Believed pass rate", belief_name))
RATIO = "actor/seq_importance_ratio"
_QUANTILE = re.compile(rf"{RATIO}_p(?P<percent>\d+)")
CLIPS = {"below": "actor/pg_clipfrac_lower", "above": "actor/pg_clipfrac_upper", "both": "actor/pg_clipfrac"}
DASHES = {"below": [4, 4], "above": [1, 0], "both": [1, 3]}
CLIP_HINTS = {"above": "solid: above", "below": "dashed: below", "both": "dotted: either side"}


def validation_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of validation accuracy that any run logged."""
    return sorted({name for run in runs for name in run.history.names if validated_source(name)})


def reward(history: History) -> Series:
    """Return the mean reward of everything generated; a run without a collector trains all of it."""
    return history.first_of("difficulty/generated_mean_reward", "critic/score/mean")


def learning(runs: Sequence[Run]) -> Section:
    """Plot validation accuracy and reward against every cost."""
    metrics = validation_metrics(runs)
    curves: list[tuple[str, str, str, str, Callable[[Run], list[Point]]]] = []
    notes = [] if metrics else ["validation accuracy: not logged (trainer.test_freq)"]
    for metric in metrics:
        source = validated_source(metric) or metric
        notes += draw.lacking(runs, lambda run, metric=metric: run.history.series(metric), metric)  # type: ignore[misc]

        def validated(run: Run, metric: str = metric) -> list[Point]:  # not smoothed
            points = {step: draw.rounded(value) for step, value in run.history.series(metric).items()}
            return [{"run": run.name, "step": step, "value": y, "trend": y} for step, y in points.items()]

        name = re.sub(r"[\W_]+", "-", f"accuracy-{source.lower()}").strip("-")
        curves.append((name, f"Accuracy on {source}", "accuracy", "~%", validated))

    words = ("reward", "Reward while training", "mean reward", "~r")
    curves.append((*words, lambda run: draw.with_trend(run, reward(run.history), "value")))
    notes += draw.lacking(runs, lambda run: reward(run.history), "training reward")
    for cost, unit in COSTS.items():
        notes += draw.lacking(runs, lambda run, cost=cost: run.spending.totals[cost], unit)  # type: ignore[misc]
    return Section(
        "learning",
        "Learning",
        "Accuracy and reward by cost. Every generated rollout is charged, also those that were not trained.",
        draw.with_values(_by_cost(runs, cost, *curve) for curve in curves for cost in COSTS),
        notes,
        columns=len(COSTS),
    )


def _by_cost(
    runs: Sequence[Run], cost: str, name: str, title: str, label: str, form: str, rows_of: Callable[[Run], list[Point]]
) -> Plot:
    spent = [(row, run.spending.until(cost, row["step"])) for run in runs for row in rows_of(run)]
    rows = [{**row, cost: draw.rounded(x)} for row, x in spent if x is not None]
    x = alt.X(cost, type="quantitative", axis=draw.number_axis(COSTS[cost]), scale=alt.Scale(nice=False))
    chart = draw.line_plot(runs, ("value", label), x=x, form=form)
    return Plot(f"{name}-by-{cost}", f"{title}, by {cost}", chart, rows)


def by_column(runs: Sequence[Run]) -> Section:
    """Show a heat map per run and column, and a table per column with the first and the last validation."""
    columns = accuracies_by_column({name: 0.0 for run in runs for name in run.history.names})
    plots, sheets = [], []
    for place, (column, values) in enumerate(columns.items(), start=1):
        rows = [[value] for value in values]
        for number, run in enumerate(runs):
            accuracy = {value: run.history.series(metric_name(column, value)) for value in values}
            validated = {step for series in accuracy.values() for step in series}
            for kind, heading, metric in SHOWN_BY_COLUMN:
                found = {value: run.history.series(metric(column, value)) for value in values}
                name, title = f"{kind}-by-column-{place}-{number + 1}", f"{heading} by {column}"
                cells = {
                    value: {step: one for step, one in series.items() if step in validated}
                    for value, series in found.items()
                }
                plots.append(_over_time(number, name, draw.titled(runs, run, title), column, cells))
            for row, series in zip(rows, accuracy.values(), strict=True):
                ends = [f"{value:.1%}" for value in series.values()]
                row.append(" → ".join([*ends[:1], *ends[1:][-1:]]) or "–")
        sheets.append(Sheet([column, *(run.name for run in runs)], rows))
    what = "accuracy by column (goldilocks.validate_by)"
    lacking = draw.lacking(runs, lambda run: accuracies_by_column(dict.fromkeys(run.history.names, 0.0)), what)
    # Runs that were validated as a whole miss nothing.
    nothing = [] if validation_metrics(runs) else ["accuracy by column: nothing was validated"]
    return Section(
        "by-column",
        "What was learnt",
        "Validation accuracy by the columns of the data: what was learnt, and what is still out of reach. Below it, "
        "with strata by that column, what was believed of the training prompts: how far beliefs lag behind.",
        draw.with_values(plots),
        lacking if columns else nothing,
        sheets=sheets,
    )


def _over_time(number: int, name: str, title: str, column: str, cells: Mapping[str, Series]) -> Plot:
    rows: list[Point] = [
        {"from": step, "to": end, "row": value, "share": draw.rounded(series[step])}
        for value, series in cells.items()
        for step, end in draw.until_next(list(series)).items()
    ]
    shown = [value for value, series in cells.items() if series]
    chart = draw.heat_map(number, column, shown, "accuracy", alt.Scale(domain=[0, 1], range=[0.03, 1]))
    return Plot(name, title, chart, rows, hint="darker: more often right", height=ROW * len(cells) + MARGIN)


def quantiles(history: History) -> dict[int, Series]:
    """Return the logged quantiles of the ratio by percent, lowest first."""
    found = {int(match["percent"]): name for name in history.names if (match := _QUANTILE.fullmatch(name))}
    return {percent: history.series(found[percent]) for percent in sorted(found)}


def ratios(runs: Sequence[Run]) -> Section:
    """Plot the quantiles of each run and the clip fractions of all runs."""
    return Section(
        "ratios",
        "Importance ratios and clipping",
        "How far the policy moved within a step, per sequence (GSPO), and the share of tokens that was clipped.",
        draw.with_values([*(_ratio(runs, number, run) for number, run in enumerate(runs)), _clips(runs)]),
        draw.lacking(runs, lambda run: quantiles(run.history), f"quantiles of GSPO's {RATIO}")
        + draw.lacking(runs, lambda run: run.history.first_of(*CLIPS.values()), "actor/pg_clipfrac*"),
    )


def _ratio(runs: Sequence[Run], number: int, run: Run) -> Plot:
    """Plot the median or the mean, a band between each two opposite quantiles, and GSPO's clip bounds."""
    levels = quantiles(run.history)
    centre = "median" if 50 in levels else "mean"
    middle = levels.get(50) or run.history.series(RATIO)
    rows: list[Point] = [{"step": step, centre: draw.rounded(value)} for step, value in draw.thinned(middle).items()]
    layers, hint = [], f"line: {centre}"
    below, above = [level for level in levels if level < 50], [level for level in levels if level > 50]
    for low, high in zip(below, reversed(above), strict=False):
        name, lows, highs = f"{low}–{high}%", draw.thinned(levels[low]), draw.thinned(levels[high])
        rows += [
            {"step": step, "band": name, "low": draw.rounded(lows[step]), "high": draw.rounded(highs[step])}
            for step in lows
            if step in highs
        ]
        area = alt.Chart(draw.data()).mark_area(color=run_colour(number), opacity=0.16)
        band = area.encode(x=draw.step_axis(), y=_ratio_axis("low"), y2=alt.Y2("high:Q"))
        layers.append(band.transform_filter(alt.FieldEqualPredicate(field="band", equal=name)))
        hint += f"; band: {name}"
    line = (
        alt.Chart(draw.data())
        .mark_line(color=run_colour(number))
        .encode(x=draw.step_axis(), y=_ratio_axis(centre), tooltip=draw.tips("step:Q", f"{centre}:Q"))
        .transform_filter(f"isValid(datum.{centre})")
    )
    actor = value_at(run.config, "actor_rollout_ref.actor") or {}
    low, high = value_at(actor, "clip_ratio_low"), value_at(actor, "clip_ratio_high")
    bounds = [1.0]
    if value_at(actor, "policy_loss.loss_mode") == "gspo" and isinstance(low, float) and isinstance(high, float):
        bounds, hint = [1 - low, 1 + high], f"{hint}; dashed: clip bounds"
    rule = alt.Chart(alt.InlineData(values=[{}])).mark_rule(strokeDash=[4, 4], opacity=0.7)
    chart = draw.layered(*layers, *(rule.encode(y=alt.YDatum(bound)) for bound in bounds), line)
    return Plot(f"ratios-{number + 1}", draw.titled(runs, run, "Sequence ratio"), chart, rows, hint=hint)


def _ratio_axis(field: str) -> alt.Y:
    return alt.Y(f"{field}:Q", axis=alt.Axis(title="ratio"), scale=alt.Scale(zero=False))


def _clips(runs: Sequence[Run]) -> Plot:
    rows: list[Point] = []
    for run in runs:
        sides = {side: run.history.series(name) for side, name in CLIPS.items()}
        if sides["above"]:
            del sides["both"]
        for side, series in sides.items():
            rows += [{**row, "side": side} for row in draw.with_trend(run, series, "share")]
    y = alt.Y("trend:Q", axis=draw.number_axis("share clipped", "~%"))
    chart = draw.dashed_lines(runs, "side", DASHES, y, alt.Tooltip("share:Q", format=".2%"))
    there = {row["side"] for row in rows}
    hint = "; ".join(text for side, text in CLIP_HINTS.items() if side in there)
    return Plot("clip-fractions", "Clipped", chart, rows, hint=hint)
