"""The plots of a study: learning curves, costs to a baseline's gain, and accuracy by level. A recipe has one colour."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from goldilocks.compare.curve import at
from goldilocks.compare.interval import Interval
from goldilocks.compare.result import Results
from goldilocks.compare.show import BEFORE
from goldilocks.compare.study import Study
from goldilocks.compare.table import RecipeRow, Table
from goldilocks.compare.targets import Target
from goldilocks.recipes import name_of
from goldilocks.report.sections.base import Plot, Point, data, file_word, layered, number_axis, reference
from goldilocks.report.theme import run_colour
from goldilocks.runs.costs import COSTS

PARTS = 20  # of the cost; the seeds are averaged at the end of each
BEFORE_COLOUR = "#9aa1ab"


def colours(recipes: Sequence[str]) -> dict[str, str]:
    """Return the colour of each recipe by its name."""
    return {name_of(recipe): run_colour(number) for number, recipe in enumerate(recipes)}


def _by_recipe(colour: dict[str, str]) -> alt.Color:
    return alt.Color("recipe:N", scale=alt.Scale(domain=list(colour), range=list(colour.values())))


def curves(study: Study, results: Results) -> Plot:
    """Plot accuracy against the cost that is equal for all arms: the mean over the seeds with a confidence band."""
    kind = next(cost for cost in COSTS if cost.name == study.cost.kind)
    base = alt.Chart(data()).encode(
        x=alt.X("cost:Q", axis=number_axis(kind.title, kind.form), scale=alt.Scale(nice=False)),
        color=_by_recipe(colours(study.recipes)),
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
            rows.append({"recipe": name_of(recipe), "cost": cost, **_accuracy(Interval.of(known))})
    return rows


def _accuracy(value: Interval) -> Point:
    half = value.half or 0.0
    return {"accuracy": value.mean, "low": max(value.mean - half, 0.0), "high": min(value.mean + half, 1.0)}


def costs(table: Table, place: int) -> list[Plot]:
    """Plot what each recipe pays for shares of a baseline's gain, as ratios to what the baseline pays."""
    baseline = next(row for row in table.rows if row.recipe == table.baselines[place])
    others = [row for row in table.rows if row is not baseline]
    rows = [point for row in others for point in _ratios(row, baseline, place, table.cost.amount)]
    if not rows:
        return []
    base = alt.Chart(data()).encode(
        x=alt.X("share:O", axis=alt.Axis(title=None, labelAngle=0), sort=None),
        xOffset=alt.XOffset("recipe:N", sort=[name_of(row.recipe) for row in others]),
        color=_by_recipe(colours([row.recipe for row in table.rows])),
        tooltip=[alt.Tooltip("recipe:N"), alt.Tooltip("share:O"), alt.Tooltip("ratio:Q"), alt.Tooltip("interval:N")],
    )
    y = alt.Y("ratio:Q", axis=number_axis(f"{table.cost.kind}, as a multiple", "~r"), scale=alt.Scale(zero=True))
    intervals = base.mark_rule(strokeWidth=2, opacity=0.5).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
    triangles = base.mark_point(shape="triangle-up", filled=True, size=70, opacity=0.7, yOffset=-9).encode(
        y=alt.Y("open:Q")
    )
    open_ends = [triangles] if any(row["open"] is not None for row in rows) else []
    chart = layered(reference(1.0), intervals, *open_ends, base.mark_circle(size=90, opacity=1).encode(y=y))
    name = name_of(baseline.recipe)
    hint = "below the dashed line: cheaper than the baseline; a triangle: some draws of the seeds do not reach it"
    return [Plot(f"costs-{name}", f"Cost to reach shares of {name}'s gain", chart, rows, hint=hint, wide=True)]


def _ratios(row: RecipeRow, baseline: RecipeRow, place: int, until: float) -> list[Point]:
    """Return a point for each target that is reached, or may be; an open interval ends at the equal cost."""
    pairs = zip(row.against[place].targets, baseline.against[place].targets, strict=True)
    return [_ratio(row, mine, until / its.cost.value) for mine, its in pairs if its.cost.value and _known(mine)]


def _known(target: Target) -> bool:
    return target.ratio.value is not None or (target.ratio.interval or (None, None))[0] is not None


def _ratio(row: RecipeRow, target: Target, most: float) -> Point:
    low, high = target.ratio.interval or (target.ratio.value, target.ratio.value)
    return {
        "recipe": name_of(row.recipe),
        "share": f"{target.share:.0%} of the gain",
        "ratio": target.ratio.value,
        "low": low,
        "high": most if high is None else high,
        "open": most if high is None else None,
        "interval": f"{low:.2f} – {'not reached' if high is None else f'{high:.2f}'}",
    }


def levels(table: Table, column: str) -> Plot:
    """Plot the accuracy of each recipe by the values of a column, beside that before training."""
    names = [BEFORE, *(name_of(row.recipe) for row in table.rows)]
    found = [table.start_levels[column], *(row.levels[column] for row in table.rows)]
    values = table.columns[column]
    rows = [
        {"recipe": name, "value": value, **_accuracy(own[value])}
        for name, own in zip(names, found, strict=True)
        for value in values
    ]
    base = alt.Chart(data()).encode(
        x=alt.X("value:O", axis=alt.Axis(title=column, labelAngle=0), sort=values),
        color=_by_recipe({BEFORE: BEFORE_COLOUR, **colours([row.recipe for row in table.rows])}),
        tooltip=[alt.Tooltip("recipe:N"), alt.Tooltip("value:O"), alt.Tooltip("accuracy:Q", format=".1%")],
    )
    band = base.mark_area(opacity=0.1).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
    y = alt.Y("accuracy:Q", axis=number_axis("accuracy", "~%"))
    line = base.mark_line(point=alt.OverlayMarkDef(size=40)).encode(y=y)
    title, hint = f"Accuracy by {column}", f"at {table.cost}; grey: {BEFORE}"
    return Plot(f"by-{file_word(column)}", title, layered(band, line), rows, hint=hint, wide=True)
