"""What was learnt: accuracy and reward by cost, accuracy by the columns of the data, and GSPO's importance ratios.

The ratio of a sequence is shown by quantile, with how often it is clipped on either side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import altair as alt

from goldilocks.dotted_keys import value_at
from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section, run_colour
from goldilocks.lab.report.run import Run
from goldilocks.runs.costs import COSTS, CostKind
from goldilocks.runs.history import (
    History,
    Series,
    belief_name,
    column_and_value,
    metric_name,
    place_of,
    validated_source,
)
from goldilocks.sheet import Sheet

SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")
MOST_LABELS = 5  # runs that are named at the end of their line; more would cover the lines
ROW, MARGIN = 22, 60  # pixels of a value in a heat map, and of the axis below
CHARACTER_WIDTH, LINE_HEIGHT = 0.027, 0.075  # of a label, as a share of the plot
SHOWN_BY_COLUMN = (("accuracy", "Accuracy", metric_name), ("belief", "Believed pass rate", belief_name))
RATIO = "actor/seq_importance_ratio"
_QUANTILE = re.compile(rf"{RATIO}[/_](?P<level>min|max|p\d+)")
_ENDS = {"min": 0.0, "max": 100.0}
CLIPS = {"below": "actor/pg_clipfrac_lower", "above": "actor/pg_clipfrac_upper", "both": "actor/pg_clipfrac"}
DASHES = {"below": [4, 4], "above": [1, 0], "both": [1, 3]}


def validation_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of validation accuracy that any run logged."""
    return sorted({name for run in runs for name in run.history.names if validated_source(name)})


def reward(history: History) -> Series:
    """Return the mean reward of everything generated; a run without a collector trains all of it."""
    return history.first_of("difficulty/generated_mean_reward", "critic/score/mean")


def learning(runs: Sequence[Run]) -> Section:
    """Plot validation accuracy and reward against every cost."""
    plots: list[Plot] = []
    metrics = validation_metrics(runs)
    notes = [] if metrics else ["validation accuracy: not logged (trainer.test_freq)"]
    for metric in metrics:
        notes += draw.lacking(runs, lambda run, metric=metric: run.history.series(metric), metric)  # type: ignore[misc]
        plots += [plot for cost in COSTS for plot in _validation(runs, metric, cost)]
    plots += [plot for cost in COSTS for plot in _reward(runs, cost)]
    notes += draw.lacking(runs, lambda run: reward(run.history), "training reward")
    for cost in COSTS:
        notes += draw.lacking(runs, lambda run, cost=cost: run.spending.totals[cost.name], cost.title)  # type: ignore[misc]
    return Section(
        "learning",
        "Learning",
        "Accuracy and reward by cost. Every generated rollout is charged, also those that were not trained.",
        plots,
        notes,
        columns=len(COSTS),
    )


def _validation(runs: Sequence[Run], metric: str, cost: CostKind) -> list[Plot]:
    source = validated_source(metric) or metric
    rows: list[Point] = []
    for run in runs:
        points = {step: draw.rounded(value) for step, value in run.history.series(metric).items()}
        exact = [{"run": run.name, "step": step, "value": y, "trend": y} for step, y in points.items()]  # not smoothed
        rows += _against(cost, run, exact)
    if not rows:
        return []
    ends = _ends(rows, cost) if 1 < len(runs) <= MOST_LABELS else []
    labels = [_end_labels(runs, side) for side in SIDES if any(row["side"] == side for row in ends)]
    chart = draw.layered(draw.line_plot(runs, ("value", "accuracy"), x=_cost_axis(cost), form="~%"), *labels)
    title = f"Accuracy on {source}, by {cost.name}"
    return [Plot(f"accuracy-{draw.file_word(source)}-by-{cost.name}", title, chart, rows + ends)]


def _reward(runs: Sequence[Run], cost: CostKind) -> list[Plot]:
    rows = [row for run in runs for row in _against(cost, run, draw.with_trend(run, reward(run.history), "value"))]
    if not rows:
        return []
    chart = draw.line_plot(runs, ("value", "mean reward"), x=_cost_axis(cost), form="~r")
    return [Plot(f"reward-by-{cost.name}", f"Reward while training, by {cost.name}", chart, rows)]


def _cost_axis(cost: CostKind) -> alt.X:
    axis = draw.number_axis(cost.title, cost.form)
    return alt.X(cost.name, type="quantitative", axis=axis, scale=alt.Scale(nice=False))


def _against(cost: CostKind, run: Run, rows: Sequence[Point]) -> list[Point]:
    """Return the rows with what had been spent by then."""
    spent = [(row, run.spending.until(cost.name, row["step"])) for row in rows]
    return [{**row, cost.name: draw.rounded(x)} for row, x in spent if x is not None]


def _ends(rows: Sequence[Point], cost: CostKind) -> list[Point]:
    """Return a label for the end of each line, moved up if it would cover another.

    A line that ends early has its label behind its end, a line over the full width above it.
    """
    last = {row["run"]: row for row in rows}
    values, width = [row["value"] for row in rows], max(row[cost.name] for row in rows) or 1.0
    line_height = LINE_HEIGHT * (max(values) - min(values))
    labels: list[Point] = []
    for row in sorted(last.values(), key=lambda row: row["value"]):
        end, length = row[cost.name] / width, CHARACTER_WIDTH * len(row["run"])
        early = end + length < 1
        span = (end, end + length) if early else (end - length, end)
        place = row["value"] if early else row["value"] + line_height
        for other in labels:
            if span[0] < other["span"][1] and other["span"][0] < span[1]:
                place = max(place, other["label_y"] + line_height)
        side = "left" if early else "right"
        labels.append({"run": row["run"], "side": side, "label_x": row[cost.name], "label_y": place, "span": span})
    return labels


def _end_labels(runs: Sequence[Run], side: Literal["left", "right"]) -> alt.Chart:
    return (
        alt.Chart(draw.data())
        .mark_text(align=side, dx=8 if side == "left" else 0, fontSize=11, fontWeight=600)
        .encode(x=alt.X("label_x:Q"), y=alt.Y("label_y:Q"), text=alt.Text("run:N"), color=draw.by_run(runs))
        .transform_filter(alt.FieldEqualPredicate(field="side", equal=side))
    )


def by_column(runs: Sequence[Run]) -> Section:
    """Show a heat map per run and column, and a table per column with the first and the last validation."""
    columns = {column: values_of(runs, column) for column in columns_of(runs)}
    plots = [
        plot
        for place, (column, values) in enumerate(columns.items(), start=1)
        for number, run in enumerate(runs)
        for shown in SHOWN_BY_COLUMN
        for plot in _over_time(runs, number, run, place, column, values, shown)
    ]
    lacking = draw.lacking(runs, lambda run: columns_of([run]), "accuracy by column (goldilocks.validate_by)")
    # Runs that were validated as a whole miss nothing.
    nothing = [] if validation_metrics(runs) else ["accuracy by column: nothing was validated"]
    return Section(
        "by-column",
        "What was learnt",
        "Validation accuracy by the columns of the data: what was learnt, and what is still out of reach. Below it, "
        "with strata by that column, what was believed of the training prompts: how far beliefs lag behind.",
        plots,
        lacking if columns else nothing,
        sheets=[_table(runs, column, values) for column, values in columns.items()],
    )


def columns_of(runs: Sequence[Run]) -> list[str]:
    """Return the columns that some run was validated by."""
    return list(dict.fromkeys(column for column, _ in _logged(runs)))


def values_of(runs: Sequence[Run], column: str) -> list[str]:
    """Return the values of a column, numbers in their order."""
    return sorted({value for one, value in _logged(runs) if one == column}, key=place_of)


def accuracy(run: Run, column: str, value: str) -> Series:
    """Return the accuracy over the rows with this value, by step."""
    return run.history.series(metric_name(column, value))


def _logged(runs: Sequence[Run]) -> list[tuple[str, str]]:
    found = (column_and_value(name) for run in runs for name in run.history.names)
    return [one for one in found if one is not None]


def _over_time(
    runs: Sequence[Run],
    number: int,
    run: Run,
    place: int,
    column: str,
    values: Sequence[str],
    shown: tuple[str, str, Callable[[str, str], str]],
) -> list[Plot]:
    """Return a heat map: a row for each value, a cell for each validation."""
    kind, heading, metric = shown
    validated = {step for value in values for step in accuracy(run, column, value)}
    rows: list[Point] = []
    for value in values:
        series = {step: one for step, one in run.history.series(metric(column, value)).items() if step in validated}
        for step, end in draw.until_next(list(series)).items():
            rows.append({"from": step, "to": end, "value": value, "accuracy": draw.rounded(series[step])})
    chart = draw.heat_map(
        number,
        alt.Y("value:O", sort=list(values), axis=alt.Axis(title=column, grid=False)),
        alt.Opacity("accuracy:Q", scale=alt.Scale(domain=[0, 1], range=[0.03, 1]), legend=None),
        alt.Tooltip("value:N", title=column),
        alt.Tooltip("accuracy:Q", format=".1%"),
    )
    name, title = f"{kind}-by-column-{place}-{number + 1}", draw.titled(runs, run, f"{heading} by {column}")
    height = ROW * len(values) + MARGIN
    return [Plot(name, title, chart, rows, hint="darker: more often right", height=height)] if rows else []


def _table(runs: Sequence[Run], column: str, values: Sequence[str]) -> Sheet:
    """Return a row for each value, with the accuracy before and after of each run."""
    rows = [[value, *(_first_and_last(accuracy(run, column, value)) for run in runs)] for value in values]
    return Sheet([column, *(run.name for run in runs)], rows)


def _first_and_last(series: Series) -> str:
    ends = [f"{value:.1%}" for value in series.values()]
    return "–" if not ends else ends[0] if len(ends) == 1 else f"{ends[0]} → {ends[-1]}"


def quantiles(history: History) -> dict[float, Series]:
    """Return the logged quantiles of the ratio by level in percent, lowest first."""
    found = {name: match["level"] for name in history.names if (match := _QUANTILE.fullmatch(name))}
    percents = {name: _ENDS[level] if level in _ENDS else float(level[1:]) for name, level in found.items()}
    return {percents[name]: history.series(name) for name in sorted(percents, key=percents.__getitem__)}


def ratios(runs: Sequence[Run]) -> Section:
    """Plot the quantiles of each run and the clip fractions of all runs."""
    plots = [plot for number, run in enumerate(runs) for plot in _ratio(runs, number, run)]
    return Section(
        "ratios",
        "Importance ratios and clipping",
        "How far the policy moved within a step, per sequence (GSPO), and the share of tokens that was clipped.",
        [*plots, *_clips(runs)],
        draw.lacking(runs, lambda run: quantiles(run.history), f"quantiles of GSPO's {RATIO}")
        + draw.lacking(runs, lambda run: run.history.first_of(*CLIPS.values()), "actor/pg_clipfrac*"),
    )


def _ratio(runs: Sequence[Run], number: int, run: Run) -> list[Plot]:
    levels, mean = quantiles(run.history), draw.thinned(run.history.series(RATIO))
    if not levels and not mean:
        return []
    rows: list[Point] = [{"step": step, "mean": draw.rounded(value)} for step, value in mean.items()]
    layers: list[alt.Chart] = []
    for low, high in _pairs(levels):
        name = f"{low:g}–{high:g}%"
        rows += _band(name, draw.thinned(levels[low]), draw.thinned(levels[high]))
        layers.append(_band_layer(name, run_colour(number)))
    if 50.0 in levels:
        rows += [{"step": step, "median": draw.rounded(value)} for step, value in draw.thinned(levels[50.0]).items()]
    centre = "median" if 50.0 in levels else "mean"
    line = (
        alt.Chart(draw.data())
        .mark_line(color=run_colour(number))
        .encode(x=draw.step_axis(), y=_ratio_axis(centre), tooltip=draw.tips("step:Q", f"{centre}:Q"))
        .transform_filter(f"isValid(datum.{centre})")
    )
    hint = f"line: {centre}" + "".join(f"; band: {low:g}–{high:g}%" for low, high in _pairs(levels))
    bounds = _clip_bounds(run.config)
    if bounds:
        hint += "; dashed: clip bounds"
    chart = draw.layered(*layers, *map(draw.reference, bounds or [1.0]), line)
    return [Plot(f"ratios-{number + 1}", draw.titled(runs, run, "Sequence ratio"), chart, rows, hint=hint)]


def _clip_bounds(config: Mapping[str, Any]) -> list[float]:
    """Return 1 − ε_low and 1 + ε_high if the configuration has them."""
    actor = value_at(config, "actor_rollout_ref.actor")
    low, high = value_at(actor or {}, "clip_ratio_low"), value_at(actor or {}, "clip_ratio_high")
    gspo = value_at(actor or {}, "policy_loss.loss_mode") == "gspo"
    return [1 - low, 1 + high] if gspo and isinstance(low, float) and isinstance(high, float) else []


def _pairs(levels: Mapping[float, Series]) -> list[tuple[float, float]]:
    """Return pairs of opposite quantiles, the widest pair first."""
    below = [level for level in levels if level < 50]
    above = [level for level in reversed(list(levels)) if level > 50]
    return list(zip(below, above, strict=False))


def _band(name: str, low: Series, high: Series) -> list[Point]:
    return [
        {"step": step, "band": name, "low": draw.rounded(low[step]), "high": draw.rounded(high[step])}
        for step in low
        if step in high
    ]


def _band_layer(name: str, colour: str) -> alt.Chart:
    return (
        alt.Chart(draw.data())
        .mark_area(color=colour, opacity=0.16)
        .encode(x=draw.step_axis(), y=_ratio_axis("low"), y2=alt.Y2("high:Q"))
        .transform_filter(alt.FieldEqualPredicate(field="band", equal=name))
    )


def _ratio_axis(field: str) -> alt.Y:
    return alt.Y(f"{field}:Q", axis=alt.Axis(title="ratio"), scale=alt.Scale(zero=False))


def _clips(runs: Sequence[Run]) -> list[Plot]:
    rows: list[Point] = []
    for run in runs:
        sides = {side: run.history.series(name) for side, name in CLIPS.items()}
        if sides["above"]:
            del sides["both"]
        for side, series in sides.items():
            rows += [{**row, "side": side} for row in draw.with_trend(run, series, "share")]
    if not rows:
        return []
    y = alt.Y("trend:Q", axis=draw.number_axis("share clipped", "~%"))
    chart = draw.dashed_lines(runs, "side", DASHES, y, alt.Tooltip("share:Q", format=".2%"))
    sides_there = {row["side"] for row in rows}
    names = {"above": "solid: above", "below": "dashed: below", "both": "dotted: either side"}
    hint = "; ".join(text for side, text in names.items() if side in sides_there)
    return [Plot("clip-fractions", "Clipped", chart, rows, hint=hint)]
