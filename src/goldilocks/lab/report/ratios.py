"""GSPO's sequence-level importance ratio, by quantile, and how often it is clipped on either side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from goldilocks.dotted_keys import value_at
from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section, run_colour
from goldilocks.lab.report.run import Run
from goldilocks.runs.history import History, Series

RATIO = "actor/seq_importance_ratio"
_QUANTILE = re.compile(rf"{RATIO}[/_](?P<level>min|max|p\d+)")
_ENDS = {"min": 0.0, "max": 100.0}
CLIPS = {"below": "actor/pg_clipfrac_lower", "above": "actor/pg_clipfrac_upper", "both": "actor/pg_clipfrac"}
DASHES = {"below": [4, 4], "above": [1, 0], "both": [1, 3]}


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
