"""What was learnt: accuracy and reward by rollouts, tokens and time, and accuracy by the columns of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import altair as alt

from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section
from goldilocks.lab.report.run import Run
from goldilocks.runs.costs import COSTS, Cost
from goldilocks.runs.history import History, Series, column_and_value, metric_name, place_of, validated_source
from goldilocks.sheet import Sheet

SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")
MOST_LABELS = 5  # runs that are named at the end of their line; more would cover the lines
ROW, MARGIN = 22, 60  # pixels of a value in a heat map, and of the axis below
CHARACTER_WIDTH, LINE_HEIGHT = 0.027, 0.075  # of a label, as a share of the plot


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


def _validation(runs: Sequence[Run], metric: str, cost: Cost) -> list[Plot]:
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


def _reward(runs: Sequence[Run], cost: Cost) -> list[Plot]:
    rows = [row for run in runs for row in _against(cost, run, draw.with_trend(run, reward(run.history), "value"))]
    if not rows:
        return []
    chart = draw.line_plot(runs, ("value", "mean reward"), x=_cost_axis(cost), form="~r")
    return [Plot(f"reward-by-{cost.name}", f"Reward while training, by {cost.name}", chart, rows)]


def _cost_axis(cost: Cost) -> alt.X:
    axis = draw.number_axis(cost.title, cost.form)
    return alt.X(cost.name, type="quantitative", axis=axis, scale=alt.Scale(nice=False))


def _against(cost: Cost, run: Run, rows: Sequence[Point]) -> list[Point]:
    """Return the rows with what had been spent by then."""
    spent = [(row, run.spending.until(cost.name, row["step"])) for row in rows]
    return [{**row, cost.name: draw.rounded(x)} for row, x in spent if x is not None]


def _ends(rows: Sequence[Point], cost: Cost) -> list[Point]:
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
        for plot in _over_time(runs, number, run, place, column, values)
    ]
    return Section(
        "by-column",
        "What was learnt",
        "Validation accuracy by the columns of the data: what was learnt, and what is still out of reach.",
        plots,
        _notes(runs, bool(columns)),
        sheets=[_table(runs, column, values) for column, values in columns.items()],
    )


def _notes(runs: Sequence[Run], validated_by_column: bool) -> list[str]:
    """Say what is missing; a run that was validated as a whole misses nothing."""
    if validated_by_column:
        return draw.lacking(runs, lambda run: columns_of([run]), "accuracy by column (goldilocks.validate_by)")
    validated = any(validated_source(name) for run in runs for name in run.history.names)
    return [] if validated else ["accuracy by column: nothing was validated"]


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
    runs: Sequence[Run], number: int, run: Run, place: int, column: str, values: Sequence[str]
) -> list[Plot]:
    """Return a heat map: a row for each value, a cell for each validation."""
    rows: list[Point] = []
    for value in values:
        series = accuracy(run, column, value)
        for step, end in draw.until_next(list(series)).items():
            rows.append({"from": step, "to": end, "value": value, "accuracy": draw.rounded(series[step])})
    chart = draw.heat_map(
        number,
        alt.Y("value:O", sort=list(values), axis=alt.Axis(title=column, grid=False)),
        alt.Opacity("accuracy:Q", scale=alt.Scale(domain=[0, 1], range=[0.03, 1]), legend=None),
        alt.Tooltip("value:N", title=column),
        alt.Tooltip("accuracy:Q", format=".1%"),
    )
    name, title = f"accuracy-by-column-{place}-{number + 1}", draw.titled(runs, run, f"Accuracy by {column}")
    height = ROW * len(values) + MARGIN
    return [Plot(name, title, chart, rows, hint="darker: more often right", height=height)] if rows else []


def _table(runs: Sequence[Run], column: str, values: Sequence[str]) -> Sheet:
    """Return a row for each value, with the accuracy before and after of each run."""
    rows = [[value, *(_first_and_last(accuracy(run, column, value)) for run in runs)] for value in values]
    return Sheet([column, *(run.name for run in runs)], rows)


def _first_and_last(series: Series) -> str:
    ends = [f"{value:.1%}" for value in series.values()]
    return "–" if not ends else ends[0] if len(ends) == 1 else f"{ends[0]} → {ends[-1]}"
