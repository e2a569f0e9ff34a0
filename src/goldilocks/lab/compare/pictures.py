"""The pictures and the report of a study: learning curves on each clock, and its tables.

They need the extra ``report``; the table is written without them. A recipe has one colour everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import altair as alt
import numpy as np

from goldilocks.config.recipes import name_of
from goldilocks.lab import Interval
from goldilocks.lab.compare.show import by_seed, caption, spent, tables, warnings
from goldilocks.lab.compare.study import Results, Study, StudyFolder
from goldilocks.lab.compare.table import Table
from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section
from goldilocks.lab.report.page import Opening, write_report
from goldilocks.runs.costs import COSTS

PARTS = 20  # of the cost; the seeds are averaged at the end of each


def colours(recipes: Sequence[str]) -> dict[str, str]:
    return {name_of(recipe): draw.run_colour(number) for number, recipe in enumerate(recipes)}


def curves(table: Table, results: Results) -> list[Plot]:
    """Plot accuracy against each clock, the study's own first: means over the seeds with confidence bands."""
    colour = colours([row.recipe for row in table.rows])
    by_recipe = alt.Color("recipe:N", scale=alt.Scale(domain=list(colour), range=list(colour.values())))
    plots = []
    for number, clock in enumerate(table.clocks):
        kind = clock.cost.kind
        base = alt.Chart(draw.data()).encode(
            x=alt.X("cost:Q", axis=draw.number_axis(COSTS[kind]), scale=alt.Scale(nice=False)), color=by_recipe
        )
        y = alt.Y("accuracy:Q", axis=draw.number_axis("accuracy", "~%"), scale=alt.Scale(zero=False))
        band = base.mark_area(opacity=0.12).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False)), y2=alt.Y2("high:Q"))
        chart = draw.layered(band, base.mark_line().encode(y=y))
        seeds = "one seed" if len(clock.seeds) == 1 else f"mean and 95% band over {len(clock.seeds)} seeds"
        name, title = f"curves-{kind}" if number else "curves", f"Accuracy by {kind}"
        spent = np.linspace(0, clock.cost.amount, PARTS + 1)
        rows: list[Point] = []
        for row in table.rows:
            arms = [one for one in results.reported if one.recipe == row.recipe and one.seed in clock.seeds]
            found = np.array([one.accuracies(kind, spent) for one in arms])
            for cost, known in zip(spent.tolist(), found.T.tolist(), strict=True):
                value = Interval.of(known)
                low, high = value.mean - (value.half or 0.0), value.mean + (value.half or 0.0)
                bounds = {"low": max(low, 0.0), "high": min(high, 1.0)}
                rows.append({"recipe": name_of(row.recipe), "cost": cost, "accuracy": value.mean, **bounds})
        plots.append(Plot(name, title, chart, rows, hint=seeds, height=360, wide=True))
    return plots


def write_pictures(study: Study, results: Results, table: Table, folder: StudyFolder) -> None:
    """Write ``report.html`` and its PNGs: the study, and as many whole seeds as there are colours."""
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
        title, said = f"Against {name_of(baseline)}", by_seed(table, baseline)
        sections.append(Section(f"against-{place}", title, lead, notes=said, sheets=[sheet]))
    lead = f"At {table.cost}, and before training."
    for place, (column, sheet) in enumerate(zip(table.columns, others[len(table.baselines) :], strict=True), start=1):
        title = f"Accuracy by {column}"
        sections.append(Section(f"by-{place}", title, lead, sheets=[sheet]))
    arms_in_all = table.reported.arms + table.tuning.arms
    lead = f"{arms_in_all} arms and {table.reported.rollouts + table.tuning.rollouts:,.0f} rollouts in all."
    sections.append(Section("spent", "Cost and tuning", lead, notes=spent(table)))
    return Opening(" · ".join(colour), caption(table), list(colour.items()), sections, arms)
