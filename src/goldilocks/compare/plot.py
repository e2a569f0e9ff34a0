"""The learning curves of a study: for each recipe the mean over its seeds with a confidence band."""

from __future__ import annotations

import altair as alt

from goldilocks.compare.curve import at
from goldilocks.compare.interval import Interval
from goldilocks.compare.result import Results
from goldilocks.compare.study import Study
from goldilocks.recipes import name_of
from goldilocks.report.sections.base import Plot, Point, data, layered, number_axis
from goldilocks.report.theme import run_colour
from goldilocks.runs.costs import COSTS

PARTS = 20  # of the cost; the seeds are averaged at the end of each


def curves(study: Study, results: Results) -> Plot:
    """Plot accuracy against the cost that is equal for all arms."""
    kind = next(cost for cost in COSTS if cost.name == study.cost.kind)
    names = [name_of(recipe) for recipe in study.recipes]
    scale = alt.Scale(domain=names, range=[run_colour(number) for number in range(len(names))])
    base = alt.Chart(data()).encode(
        x=alt.X("cost:Q", axis=number_axis(kind.title, kind.form), scale=alt.Scale(nice=False)),
        color=alt.Color("recipe:N", scale=scale),
    )
    y = alt.Y("accuracy:Q", axis=number_axis("accuracy", "~%"), scale=alt.Scale(zero=False))
    band = base.mark_area(opacity=0.12).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False)), y2=alt.Y2("high:Q"))
    chart = layered(band, base.mark_line().encode(y=y))
    seeds = "one seed" if study.seeds == 1 else f"mean and 95% band over {study.seeds} seeds"
    return Plot("curves", f"Accuracy by {kind.name}", chart, _rows(study, results), hint=seeds, height=360, wide=True)


def _rows(study: Study, results: Results) -> list[Point]:
    rows: list[Point] = []
    for recipe in study.recipes:
        lines = [one.curve(study.cost.kind) for one in results.reported if one.recipe == recipe]
        for part in range(PARTS + 1):
            cost = study.cost.amount * part / PARTS
            known = [value for value in (at(line, cost) for line in lines) if value is not None]
            interval = Interval.of(known)
            half = interval.half or 0.0
            rows.append({
                "recipe": name_of(recipe),
                "cost": cost,
                "accuracy": interval.mean,
                "low": max(interval.mean - half, 0.0),
                "high": min(interval.mean + half, 1.0),
            })  # fmt: skip
    return rows
