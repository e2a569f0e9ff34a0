"""The pictures and the report of a study: learning curves and costs to a baseline's accuracy on
each clock, and accuracy by level.

They need the extra ``report``; the table is written without them. A recipe has one colour everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import altair as alt
import numpy as np

from goldilocks.config.recipes import name_of
from goldilocks.lab import Interval
from goldilocks.lab.compare.show import BEFORE, NOT_REACHED, by_seed, caption, spent, tables, warnings
from goldilocks.lab.compare.study import Results, Study, StudyFolder
from goldilocks.lab.compare.table import Price, RecipeRow, Table
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


def curves(table: Table, results: Results) -> list[Plot]:
    """Plot accuracy against each clock, the study's own first: means over the seeds with confidence bands."""
    plots = []
    for number, clock in enumerate(table.clocks):
        kind = next(cost for cost in COSTS if cost.name == clock.cost.kind)
        base = alt.Chart(draw.data()).encode(
            x=alt.X("cost:Q", axis=draw.number_axis(kind.title, kind.form), scale=alt.Scale(nice=False)),
            color=_by_recipe(colours([row.recipe for row in table.rows])),
        )
        y = alt.Y("accuracy:Q", axis=draw.number_axis("accuracy", "~%"), scale=alt.Scale(zero=False))
        band = base.mark_area(opacity=0.12).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False)), y2=alt.Y2("high:Q"))
        chart = draw.layered(band, base.mark_line().encode(y=y))
        seeds = "one seed" if len(clock.seeds) == 1 else f"mean and 95% band over {len(clock.seeds)} seeds"
        name, title = f"curves-{kind.name}" if number else "curves", f"Accuracy by {kind.name}"
        spent = np.linspace(0, clock.cost.amount, PARTS + 1)
        rows: list[Point] = []
        for row in table.rows:
            arms = [one for one in results.reported if one.recipe == row.recipe and one.seed in clock.seeds]
            found = np.array([one.accuracies(clock.cost.kind, spent) for one in arms])
            for cost, known in zip(spent.tolist(), found.T.tolist(), strict=True):
                rows.append({"recipe": name_of(row.recipe), "cost": cost, **_accuracy(Interval.of(known))})
        plots.append(Plot(name, title, chart, rows, hint=seeds, height=360, wide=True))
    return plots


def _accuracy(value: Interval) -> Point:
    half = value.half or 0.0
    return {"accuracy": value.mean, "low": max(value.mean - half, 0.0), "high": min(value.mean + half, 1.0)}


def costs(table: Table, baseline: str) -> list[Plot]:
    """Plot what each recipe pays on each clock for a baseline's accuracies, as ratios to what the baseline pays."""
    name = name_of(baseline)
    plots = []
    for clock in table.clocks:
        kind = clock.cost.kind
        pairs = [
            (row, one) for row in table.rows for one in row.against if (one.baseline, one.clock) == (baseline, kind)
        ]
        prices = [(row, price) for row, one in pairs for price in one.prices]
        rows = [_ratio(row, price) for row, price in prices if (price.interval or (price.ratio,))[0] is not None]
        if not rows:
            continue
        base = alt.Chart(draw.data()).encode(
            x=alt.X("share:O", axis=alt.Axis(title=None, labelAngle=0), sort=None),
            xOffset=alt.XOffset("recipe:N", sort=[name_of(row.recipe) for row, _ in pairs]),
            color=_by_recipe(colours([row.recipe for row in table.rows])),
            tooltip=draw.tips("recipe:N", "share:O", "ratio:Q", "interval:N"),
        )
        y = alt.Y("ratio:Q", axis=draw.number_axis(f"{kind}, as a multiple", "~r"), scale=alt.Scale(zero=True))
        intervals = base.mark_rule(strokeWidth=2, opacity=0.5).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
        triangle = base.mark_point(shape="triangle-up", filled=True, size=70, opacity=0.7, yOffset=-9).encode(
            y="open:Q"
        )
        ends = [triangle] if any(row["open"] is not None for row in rows) else []
        chart = draw.layered(draw.reference(1.0), intervals, *ends, base.mark_circle(size=90, opacity=1).encode(y=y))
        title = f"{kind.capitalize()} to {name}'s accuracy"
        hint = "below the dashed line: cheaper than the baseline; a triangle: it may not be reached"
        plots.append(Plot(f"costs-{name}-{kind}", title, chart, rows, hint=hint, wide=True))
    return plots


def _ratio(row: RecipeRow, price: Price) -> Point:
    """Return the point of a price that is paid, or may be; an open interval ends at the end of the clock."""
    low, high = price.interval or (price.ratio, price.ratio)
    most = 1 / price.share
    return {
        "recipe": name_of(row.recipe),
        "share": f"at {price.share:.0%}",
        "ratio": price.ratio,
        "low": low,
        "high": most if high is None else high,
        "open": most if high is None else None,
        "interval": f"{low:.2f} – {NOT_REACHED if high is None else f'{high:.2f}'}",
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
    words, word = [draw.file_word(one) for one in table.columns], draw.file_word(column)
    number = "" if word and words.count(word) == 1 else 1 + list(table.columns).index(column)
    return Plot(f"by-{word}{number}", title, draw.layered(band, line), rows, hint=hint, wide=True)


def write_pictures(study: Study, results: Results, table: Table, folder: StudyFolder) -> None:
    """Write the curves, and ``report.html`` with the study and as many whole seeds as there are colours."""
    for plot in curves(table, results):
        write_png(plot, folder.path)
    seeds = max(1, min(study.seeds, len(draw.RUN_COLOURS) // len(study.recipes)))
    arms = study.reported_arms(study.choose(results.tuned))[: seeds * len(study.recipes)]
    shown = "The arms of seed 1" if seeds == 1 else f"The arms of seeds 1 to {seeds}"
    opening = make_opening(results, table, shown)
    write_report([folder.run(arm) for arm in arms], folder.path / "report.html", opening=opening)


def make_opening(results: Results, table: Table, arms: str) -> Opening:
    """Return the study as a page opens with it."""
    colour = colours([row.recipe for row in table.rows])
    main, *others = [replace(sheet, colours=colour) for sheet in tables(table)]
    lead = "Every arm spent the same. Accuracy is the mean over the seeds with its 95% interval."
    sections = [Section("study", "Result", lead, curves(table, results), warnings(table), sheets=[main])]
    lead = (
        "Differences seed by seed, in points. What the baseline's accuracy after a share of each clock costs, the "
        "ratio to what the baseline paid, and the ratio's 95% interval over the seeds."
    )
    for place, (baseline, sheet) in enumerate(zip(table.baselines, others, strict=False), start=1):
        plots, said = costs(table, baseline), by_seed(table, baseline)
        title = f"Against {name_of(baseline)}"
        sections.append(Section(f"against-{place}", title, lead, plots, said, sheets=[sheet]))
    lead = f"At {table.cost}, and before training."
    for place, (column, sheet) in enumerate(zip(table.columns, others[len(table.baselines) :], strict=True), start=1):
        title = f"Accuracy by {column}"
        sections.append(Section(f"by-{place}", title, lead, [levels(table, column)], sheets=[sheet]))
    arms_in_all = table.reported.arms + table.tuning.arms
    lead = f"{arms_in_all} arms and {table.reported.rollouts + table.tuning.rollouts:,.0f} rollouts in all."
    sections.append(Section("spent", "Cost and tuning", lead, notes=spent(table)))
    return Opening(" · ".join(colour), caption(table), list(colour.items()), sections, arms)
