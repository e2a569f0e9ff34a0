"""Kept and generated length: shows whether a filter, or the order of arrival, favours short answers."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from goldilocks.report.run import Run
from goldilocks.report.sections.base import (
    Plot,
    Point,
    Section,
    by_run,
    data,
    lacking,
    layered,
    line_plot,
    number_axis,
    reference,
    step_axis,
    with_trend,
)

GENERATED = ("length/generated_mean", "response_length/mean")  # a run without a collector trains everything
KEPT = "length/kept_mean"
RATIO = "length/kept_over_generated"


def lengths(runs: Sequence[Run]) -> Section:
    """Plot both lengths and their ratio."""
    return Section(
        "lengths",
        "Kept and generated length",
        "Mean tokens per answer. If the kept answers are shorter than the generated ones, short answers are favoured.",
        [*_lengths(runs), *_ratio(runs)],
        lacking(runs, lambda run: run.history.first_of(*GENERATED), "generated length")
        + lacking(runs, lambda run: run.history.series(KEPT), "kept length"),
    )


def _lengths(runs: Sequence[Run]) -> list[Plot]:
    rows: list[Point] = []
    for run in runs:
        for kind, series in (("generated", run.history.first_of(*GENERATED)), ("kept", run.history.series(KEPT))):
            rows += [{**row, "of": kind} for row in with_trend(run, series, "tokens")]
    if not rows:
        return []
    dash = alt.StrokeDash("of:N", scale=alt.Scale(domain=["kept", "generated"], range=[[1, 0], [4, 4]]))
    chart = (
        alt.Chart(data())
        .mark_line()
        .encode(
            x=step_axis(),
            y=alt.Y("trend:Q", axis=number_axis("tokens per answer"), scale=alt.Scale(zero=False)),
            color=by_run(runs),
            strokeDash=dash,
            tooltip=[alt.Tooltip("run:N"), alt.Tooltip("of:N"), alt.Tooltip("step:Q"), alt.Tooltip("tokens:Q")],
        )
    )
    return [Plot("lengths", "Length", chart, rows, hint="solid: kept; dashed: generated")]


def _ratio(runs: Sequence[Run]) -> list[Plot]:
    rows = [row for run in runs for row in with_trend(run, run.history.series(RATIO), "ratio")]
    if not rows:
        return []
    chart = line_plot(runs, ("ratio", "kept / generated length"), form="~r")
    hint = "below the dashed line, short answers are favoured"
    return [Plot("length-ratio", "Kept over generated", layered(reference(1.0), chart), rows, hint=hint)]
