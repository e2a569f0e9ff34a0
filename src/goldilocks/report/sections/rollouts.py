"""Rollouts per prompt, and informative groups per 1,000 rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from goldilocks.report.run import Run
from goldilocks.report.sections.base import (
    Plot,
    Point,
    Section,
    data,
    lacking,
    layered,
    line_plot,
    step_axis,
    thinned,
    with_trend,
)
from goldilocks.report.theme import run_colour

MEAN = "adaptive_rollout/avg_rollouts_per_sample"
FEWEST = "adaptive_rollout/min_rollouts_per_sample"
MOST = "adaptive_rollout/max_rollouts_per_sample"
INFORMATIVE = "adaptive_rollout/informative_groups_per_1k_rollouts"


def rollouts(runs: Sequence[Run]) -> Section:
    """Plot rollouts per prompt and informative groups per 1,000 rollouts."""
    return Section(
        "rollouts",
        "Rollouts per prompt",
        "How many rollouts a prompt got before it was judged, and how many groups with differing rewards they gave.",
        [*_given(runs), *_informative(runs)],
        lacking(runs, lambda run: run.history.series(MEAN), "rollouts per prompt")
        + lacking(runs, lambda run: run.history.series(INFORMATIVE), "informative groups"),
    )


def _given(runs: Sequence[Run]) -> list[Plot]:
    """Plot rollouts per prompt on a log scale, since policies differ by factors; steps without a group are left out."""
    rows = [row for run in runs for row in with_trend(run, _positive(run, MEAN), "mean")]
    if not rows:
        return []
    scale = alt.Scale(type="log", base=2, nice=False)
    chart = line_plot(runs, ("mean", "rollouts per prompt"), form="~r", scale=scale)
    hint = "log scale"
    if len(runs) == 1:
        rows += _extremes(runs[0])
        chart = layered(_band(scale), chart)
        hint = "line: mean; band: fewest to most"
    return [Plot("rollouts-per-prompt", "Rollouts per prompt", chart, rows, hint=hint)]


def _positive(run: Run, name: str) -> dict[int, float]:
    return {step: value for step, value in run.history.series(name).items() if value > 0}


def _extremes(run: Run) -> list[Point]:
    fewest, most = thinned(_positive(run, FEWEST)), thinned(_positive(run, MOST))
    return [{"step": step, "fewest": low, "most": most[step]} for step, low in fewest.items() if step in most]


def _band(scale: alt.Scale) -> alt.Chart:
    return (
        alt.Chart(data())
        .mark_area(opacity=0.13, color=run_colour(0))
        .encode(x=step_axis(), y=alt.Y("fewest:Q", scale=scale), y2=alt.Y2("most:Q"))
        .transform_filter("isValid(datum.fewest)")
    )


def _informative(runs: Sequence[Run]) -> list[Plot]:
    rows = [row for run in runs for row in with_trend(run, run.history.series(INFORMATIVE), "groups")]
    if not rows:
        return []
    chart = line_plot(runs, ("groups", "groups per 1,000 rollouts"), form="~r", scale=alt.Scale(zero=True))
    return [Plot("informative-groups", "Informative groups", chart, rows, hint="groups whose rewards differ")]
