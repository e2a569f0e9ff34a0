"""The study's picture and its report: they need the extra ``report``, and the table does not wait for them."""

from __future__ import annotations

from goldilocks.compare.folder import StudyFolder
from goldilocks.compare.plot import curves
from goldilocks.compare.result import Results
from goldilocks.compare.study import Study
from goldilocks.report.theme import RUN_COLOURS
from goldilocks.report.write import write_png, write_report


def write_pictures(study: Study, results: Results, folder: StudyFolder) -> None:
    """Write ``curves.png``, and ``report.html`` over as many whole seeds as there are colours."""
    write_png(curves(study, results), folder.path)
    arms = study.reported_arms(study.choose(results.tuned))
    shown = max(1, len(RUN_COLOURS) // len(study.recipes)) * len(study.recipes)
    write_report([folder.run(arm) for arm in arms[:shown]], folder.path / "report.html")
