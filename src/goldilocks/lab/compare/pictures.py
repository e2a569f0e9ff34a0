"""The pictures and the report of a study: learning curves, costs to a baseline's gain, and accuracy by level.

They need the extra ``report``; the table is written without them. A recipe has one colour everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import altair as alt

from goldilocks.config.recipes import name_of
from goldilocks.lab.compare.show import BEFORE, by_seed, caption, spent, tables, warnings
from goldilocks.lab.compare.study import Results, Study, StudyFolder, at
from goldilocks.lab.compare.table import Interval, RecipeRow, Table, Target
from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section
from goldilocks.lab.report.page import Opening, write_png, write_report
from goldilocks.runs.costs import COSTS

PARTS = 20  # of the cost; the seeds are averaged at the end of each
BEFORE_COLOUR = "#9aa1ab"


def colours(recipes: Sequence[str]) -> dict[str, str]:
    """Return the colour of each recipe by its name."""
    return {name_of(recipe): draw.run_colour(number) for number, recipe in enumerate(recipes)}


def _by_recipe(colour: dict[str, str]) -> alt.Color:
    return alt.Color("recipe:N", scale=alt.Scale(domain=list(colour), range=list(colour.values())))


def curves(study: Study, results: Results) -> Plot:
    """Plot accuracy against the cost that is equal for all arms: the mean over the seeds with a confidence band."""
    kind = next(cost for cost in COSTS if cost.name == study.cost.kind)
    base = alt.Chart(draw.data()).encode(
        x=alt.X("cost:Q", axis=draw.number_axis(kind.title, kind.form), scale=alt.Scale(nice=False)),
        color=_by_recipe(colours(study.recipes)),
    )
    y = alt.Y("accuracy:Q", axis=draw.number_axis("accuracy", "~%"), scale=alt.Scale(zero=False))
    band = base.mark_area(opacity=0.12).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False)), y2=alt.Y2("high:Q"))
    chart = draw.layered(band, base.mark_line().encode(y=y))
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
    base = alt.Chart(draw.data()).encode(
        x=alt.X("share:O", axis=alt.Axis(title=None, labelAngle=0), sort=None),
        xOffset=alt.XOffset("recipe:N", sort=[name_of(row.recipe) for row in others]),
        color=_by_recipe(colours([row.recipe for row in table.rows])),
        tooltip=draw.tips("recipe:N", "share:O", "ratio:Q", "interval:N"),
    )
    y = alt.Y("ratio:Q", axis=draw.number_axis(f"{table.cost.kind}, as a multiple", "~r"), scale=alt.Scale(zero=True))
    intervals = base.mark_rule(strokeWidth=2, opacity=0.5).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
    triangles = base.mark_point(shape="triangle-up", filled=True, size=70, opacity=0.7, yOffset=-9).encode(y="open:Q")
    open_ends = [triangles] if any(row["open"] is not None for row in rows) else []
    chart = draw.layered(draw.reference(1.0), intervals, *open_ends, base.mark_circle(size=90, opacity=1).encode(y=y))
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
    base = alt.Chart(draw.data()).encode(
        x=alt.X("value:O", axis=alt.Axis(title=column, labelAngle=0), sort=values),
        color=_by_recipe({BEFORE: BEFORE_COLOUR, **colours([row.recipe for row in table.rows])}),
        tooltip=draw.tips("recipe:N", "value:O", alt.Tooltip("accuracy:Q", format=".1%")),
    )
    band = base.mark_area(opacity=0.1).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
    y = alt.Y("accuracy:Q", axis=draw.number_axis("accuracy", "~%"))
    line = base.mark_line(point=alt.OverlayMarkDef(size=40)).encode(y=y)
    title, hint = f"Accuracy by {column}", f"at {table.cost}; grey: {BEFORE}"
    return Plot(_file_name(list(table.columns), column), title, draw.layered(band, line), rows, hint=hint, wide=True)


def _file_name(columns: list[str], column: str) -> str:
    """Return the column's own file name, with its number if another column has the same."""
    words = [draw.file_word(one) for one in columns]
    word = draw.file_word(column)
    return f"by-{word}" if words.count(word) == 1 and word else f"by-{word}{1 + columns.index(column)}"


def write_pictures(study: Study, results: Results, table: Table, folder: StudyFolder) -> None:
    """Write ``curves.png``, and ``report.html`` with the study and as many whole seeds as there are colours."""
    write_png(curves(study, results), folder.path)
    seeds = max(1, min(study.seeds, len(draw.RUN_COLOURS) // len(study.recipes)))
    arms = study.reported_arms(study.choose(results.tuned))[: seeds * len(study.recipes)]
    shown = "The arms of seed 1" if seeds == 1 else f"The arms of seeds 1 to {seeds}"
    opening = make_opening(study, results, table, shown)
    write_report([folder.run(arm) for arm in arms], folder.path / "report.html", opening=opening)


def make_opening(study: Study, results: Results, table: Table, arms: str) -> Opening:
    """Return the study as a page opens with it."""
    names = [name_of(recipe) for recipe in study.recipes]
    colour = colours(study.recipes)
    sections = [_results(study, results, table, colour), *_against(table, colour), *_levels(table, colour)]
    arms_in_all = table.reported.arms + table.tuning.arms
    lead = f"{arms_in_all} arms and {table.reported.rollouts + table.tuning.rollouts:,.0f} rollouts in all."
    sections.append(Section("spent", "Cost and tuning", lead, notes=spent(table)))
    return Opening(" · ".join(names), caption(table), list(colour.items()), sections, arms)


def _results(study: Study, results: Results, table: Table, colour: dict[str, str]) -> Section:
    lead = "Every arm spent the same. Accuracy is the mean over the seeds with its 95% interval."
    sheets = [replace(tables(table)[0], colours=colour)]
    return Section("study", "Result", lead, [curves(study, results)], warnings(table), sheets=sheets)


def _against(table: Table, colour: dict[str, str]) -> list[Section]:
    lead = (
        "Differences seed by seed, in points. What it costs to have a share of the baseline's gain, its ratio to what "
        "the baseline itself needs, and the ratio's 95% interval by bootstrap over the seeds."
    )
    shown = tables(table)[1 : 1 + len(table.baselines)]
    titles = [one.title[0].upper() + one.title[1:] for one in shown]
    sheets = [[replace(one, colours=colour)] for one in shown]
    return [
        Section(f"against-{place + 1}", title, lead, costs(table, place), by_seed(table, place), sheets=sheets[place])
        for place, title in enumerate(titles)
    ]


def _levels(table: Table, colour: dict[str, str]) -> list[Section]:
    shown = tables(table)[1 + len(table.baselines) :]
    lead = f"At {table.cost}, and before training."
    sheets = [[replace(one, colours=colour)] for one in shown]
    return [
        Section(f"by-{place + 1}", f"Accuracy by {column}", lead, [levels(table, column)], sheets=sheets[place])
        for place, column in enumerate(table.columns)
    ]
