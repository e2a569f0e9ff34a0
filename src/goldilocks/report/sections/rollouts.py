"""Rollouts per prompt, informative groups, and whether the answers that are kept are shorter than those generated."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from goldilocks.report.run import Run
from goldilocks.report.sections.base import (
    Plot,
    Point,
    Section,
    dashed_lines,
    data,
    lacking,
    layered,
    line_plot,
    number_axis,
    reference,
    step_axis,
    thinned,
    trend_plot,
    with_trend,
)
from goldilocks.report.theme import run_colour

MEAN = "adaptive_rollout/avg_rollouts_per_sample"
FEWEST = "adaptive_rollout/min_rollouts_per_sample"
MOST = "adaptive_rollout/max_rollouts_per_sample"
INFORMATIVE = "adaptive_rollout/informative_groups_per_1k_rollouts"
GENERATED = ("length/generated_mean", "response_length/mean")  # a run without a collector trains everything
KEPT = "length/kept_mean"
RATIO = "length/kept_over_generated"


def rollouts(runs: Sequence[Run]) -> Section:
    """Plot rollouts per prompt and informative groups per 1,000 rollouts."""
    informative = trend_plot(
        runs,
        "informative-groups",
        "Informative groups",
        ("groups", "groups per 1,000 rollouts"),
        lambda run: run.history.series(INFORMATIVE),
        scale=alt.Scale(zero=True),
        hint="groups whose rewards differ",
    )
    return Section(
        "rollouts",
        "Rollouts per prompt",
        "How many rollouts a prompt got before it was judged, and how many groups with differing rewards they gave.",
        [*_given(runs), *informative],
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


def lengths(runs: Sequence[Run]) -> Section:
    """Plot both lengths and their ratio."""
    ratio = trend_plot(
        runs,
        "length-ratio",
        "Kept over generated",
        ("ratio", "kept / generated length"),
        lambda run: run.history.series(RATIO),
        hint="below the dashed line, short answers are favoured",
        below=[reference(1.0)],
    )
    return Section(
        "lengths",
        "Kept and generated length",
        "Mean tokens per answer. If the kept answers are shorter than the generated ones, short answers are favoured.",
        [*_lengths(runs), *ratio],
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
    y = alt.Y("trend:Q", axis=number_axis("tokens per answer"), scale=alt.Scale(zero=False))
    chart = dashed_lines(runs, "of", {"kept": [1, 0], "generated": [4, 4]}, y, "tokens:Q")
    return [Plot("lengths", "Length", chart, rows, hint="solid: kept; dashed: generated")]
