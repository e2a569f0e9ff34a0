"""Validation accuracy by the columns of the data (``goldilocks.validate_by``): which levels and skills were learnt."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from goldilocks.report.run import Run
from goldilocks.report.sections.base import Plot, Point, Section, Sheet, data, lacking, rounded, step_axis, titled
from goldilocks.report.theme import run_colour
from goldilocks.runs.history import Series, validated_source
from goldilocks.runs.validation import column_and_value, metric_name, place_of

ROW, MARGIN = 22, 60  # pixels of a value, and of the axis below


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
        return lacking(runs, lambda run: columns_of([run]), "accuracy by column (goldilocks.validate_by)")
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
        steps = list(series)
        width = steps[-1] - steps[-2] if len(steps) > 1 else 1
        for step, end in zip(steps, [*steps[1:], steps[-1] + width] if steps else [], strict=True):
            rows.append({"from": step, "to": end, "value": value, "accuracy": rounded(series[step])})
    if not rows:
        return []
    chart = (
        alt.Chart(data())
        .mark_rect(fill=run_colour(number), stroke=None)
        .encode(
            x=step_axis("from"),
            x2=alt.X2("to:Q"),
            y=alt.Y("value:O", sort=list(values), axis=alt.Axis(title=column, grid=False)),
            opacity=alt.Opacity("accuracy:Q", scale=alt.Scale(domain=[0, 1], range=[0.03, 1]), legend=None),
            tooltip=[alt.Tooltip("from:Q", title="step"), alt.Tooltip("value:N", title=column),
                     alt.Tooltip("accuracy:Q", format=".1%")],
        )
    )  # fmt: skip
    title = titled(runs, run, f"Accuracy by {column}")
    return [
        Plot(
            f"accuracy-by-column-{place}-{number + 1}",
            title,
            chart,
            rows,
            hint="darker: more often right",
            height=ROW * len(values) + MARGIN,
        )
    ]


def _table(runs: Sequence[Run], column: str, values: Sequence[str]) -> Sheet:
    """Return a row for each value, with the accuracy before and after of each run."""
    rows = [[value, *(_ends(accuracy(run, column, value)) for run in runs)] for value in values]
    return Sheet([column, *(run.name for run in runs)], rows)


def _ends(series: Series) -> str:
    ends = [f"{value:.1%}" for value in series.values()]
    return "–" if not ends else ends[0] if len(ends) == 1 else f"{ends[0]} → {ends[-1]}"
