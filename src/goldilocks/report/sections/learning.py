"""Learning curves: accuracy and reward by rollouts, tokens and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import altair as alt

from goldilocks.report.run import Run
from goldilocks.report.sections.base import (
    Plot,
    Point,
    Section,
    by_run,
    data,
    file_word,
    lacking,
    layered,
    line_plot,
    number_axis,
    rounded,
    with_trend,
)
from goldilocks.runs.costs import COSTS, Cost
from goldilocks.runs.history import History, Series, validated_source

SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")
MOST_LABELS = 5  # runs that are named at the end of their line; more would cover the lines
CHARACTER_WIDTH, LINE_HEIGHT = 0.027, 0.075  # of a label, as a share of the plot


def validation_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of validation accuracy that any run logged."""
    return sorted({name for run in runs for name in run.history.names if validated_source(name)})


def reward(history: History) -> Series:
    """Return the mean reward of everything generated; a run without a collector trains all of it."""
    return history.first_of("difficulty/generated_mean_reward", "critic/score/mean")


def learning(runs: Sequence[Run]) -> Section:
    """Validation accuracy and reward against every cost."""
    plots: list[Plot] = []
    metrics = validation_metrics(runs)
    notes = [] if metrics else ["validation accuracy: not logged (trainer.test_freq)"]
    for metric in metrics:
        notes += lacking(runs, lambda run, metric=metric: run.history.series(metric), metric)  # type: ignore[misc]
        plots += [plot for cost in COSTS for plot in _validation(runs, metric, cost)]
    plots += [plot for cost in COSTS for plot in _reward(runs, cost)]
    notes += lacking(runs, lambda run: reward(run.history), "training reward")
    for cost in COSTS:
        notes += lacking(runs, lambda run, cost=cost: run.spending.totals[cost.name], cost.title)  # type: ignore[misc]
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
        points = run.history.series(metric).items()  # validations are few: no smoothing
        exact = [{"run": run.name, "step": step, "value": rounded(y), "trend": rounded(y)} for step, y in points]
        rows += _against(cost, run, exact)
    if not rows:
        return []
    chart = line_plot(runs, ("value", "accuracy"), x=_cost_axis(cost), form="~%")
    ends = _ends(rows, cost) if 1 < len(runs) <= MOST_LABELS else []
    chart = layered(chart, *(_end_labels(runs, side) for side in SIDES if any(row["side"] == side for row in ends)))
    title = f"Accuracy on {source}, by {cost.name}"
    return [Plot(f"accuracy-{file_word(source)}-by-{cost.name}", title, chart, rows + ends)]


def _reward(runs: Sequence[Run], cost: Cost) -> list[Plot]:
    rows = [row for run in runs for row in _against(cost, run, with_trend(run, reward(run.history), "value"))]
    if not rows:
        return []
    chart = line_plot(runs, ("value", "mean reward"), x=_cost_axis(cost), form="~r")
    return [Plot(f"reward-by-{cost.name}", f"Reward while training, by {cost.name}", chart, rows)]


def _cost_axis(cost: Cost) -> alt.X:
    axis = number_axis(cost.title, cost.form)
    return alt.X(cost.name, type="quantitative", axis=axis, scale=alt.Scale(nice=False))


def _against(cost: Cost, run: Run, rows: Sequence[Point]) -> list[Point]:
    """Return the rows with what had been spent by then."""
    spent = [(row, run.spending.until(cost.name, row["step"])) for row in rows]
    return [{**row, cost.name: rounded(x)} for row, x in spent if x is not None]


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
        alt.Chart(data())
        .mark_text(align=side, dx=8 if side == "left" else 0, fontSize=11, fontWeight=600)
        .encode(x=alt.X("label_x:Q"), y=alt.Y("label_y:Q"), text=alt.Text("run:N"), color=by_run(runs))
        .transform_filter(alt.FieldEqualPredicate(field="side", equal=side))
    )
