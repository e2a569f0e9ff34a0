"""The study's picture and its report: they need the extra ``report``, and the table does not wait for them."""

from __future__ import annotations

from goldilocks.compare.folder import StudyFolder
from goldilocks.compare.plot import colours, costs, curves, levels
from goldilocks.compare.result import Results
from goldilocks.compare.show import Shown, by_seed, caption, spent, tables, warnings
from goldilocks.compare.study import Study
from goldilocks.compare.table import Table
from goldilocks.recipes import name_of
from goldilocks.report.page import Opening
from goldilocks.report.sections import Section, Sheet
from goldilocks.report.theme import RUN_COLOURS
from goldilocks.report.write import write_png, write_report


def write_pictures(study: Study, results: Results, table: Table, folder: StudyFolder) -> None:
    """Write ``curves.png``, and ``report.html`` with the study and as many whole seeds as there are colours."""
    write_png(curves(study, results), folder.path)
    seeds = max(1, min(study.seeds, len(RUN_COLOURS) // len(study.recipes)))
    arms = study.reported_arms(study.choose(results.tuned))[: seeds * len(study.recipes)]
    shown = "The arms of seed 1" if seeds == 1 else f"The arms of seeds 1 to {seeds}"
    opening = make_opening(study, results, table, shown)
    write_report([folder.run(arm) for arm in arms], folder.path / "report.html", opening=opening)


def make_opening(study: Study, results: Results, table: Table, arms: str) -> Opening:
    """Return the study as a page opens with it."""
    names = [name_of(recipe) for recipe in study.recipes]
    colour = colours(study.recipes)
    sections = [_results(study, results, table, colour), *_against(table, colour), *_levels(table, colour)]
    sections.append(Section("spent", "Cost and tuning", _spent(table), notes=spent(table)))
    return Opening(" · ".join(names), caption(table), list(colour.items()), sections, arms)


def _results(study: Study, results: Results, table: Table, colour: dict[str, str]) -> Section:
    lead = "Every arm spent the same. Accuracy is the mean over the seeds with its 95% interval."
    sheet = _sheet(tables(table)[0], colour)
    return Section("study", "Result", lead, [curves(study, results)], warnings(table), sheets=[sheet])


def _against(table: Table, colour: dict[str, str]) -> list[Section]:
    lead = (
        "Differences seed by seed, in points. What it costs to have a share of the baseline's gain, its ratio to what "
        "the baseline itself needs, and the ratio's 95% interval by bootstrap over the seeds."
    )
    shown = tables(table)[1 : 1 + len(table.baselines)]
    return [
        Section(
            f"against-{place + 1}",
            one.title[0].upper() + one.title[1:],
            lead,
            costs(table, place),
            by_seed(table, place),
            sheets=[_sheet(one, colour)],
        )
        for place, one in enumerate(shown)
    ]


def _levels(table: Table, colour: dict[str, str]) -> list[Section]:
    shown = tables(table)[1 + len(table.baselines) :]
    lead = f"At {table.cost}, and before training."
    return [
        Section(f"by-{place}", f"Accuracy by {column}", lead, [levels(table, column)], sheets=[_sheet(one, colour)])
        for place, (column, one) in enumerate(zip(table.columns, shown, strict=True), start=1)
    ]


def _sheet(shown: Shown, colour: dict[str, str]) -> Sheet:
    return Sheet(shown.headings, shown.rows, colour)


def _spent(table: Table) -> str:
    arms, rollouts = table.reported.arms + table.tuning.arms, table.reported.rollouts + table.tuning.rollouts
    return f"{arms} arms and {rollouts:,.0f} rollouts in all."
