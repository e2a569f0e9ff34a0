"""A report on disk: one HTML file, and its plots as PNGs in a folder beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import vl_convert

from goldilocks.report.page import Opening, make_page
from goldilocks.report.run import read_runs
from goldilocks.report.sections import Plot
from goldilocks.report.theme import LIGHT

WIDTH, WIDE = 560, 900


@dataclass(frozen=True)
class Written:
    """The files of a report, and what it could not show."""

    page: Path
    pngs: tuple[Path, ...]
    missing: tuple[str, ...]


def write_report(paths: Sequence[Path], out: Path, *, png: bool = True, opening: Opening | None = None) -> Written:
    """Write the report of these run directories to ``out``, and PNGs to the folder of that name without ``.html``."""
    if out.suffix != ".html":
        raise ValueError(f"--out={str(out)!r} is not accepted: a file name that ends in .html")
    page = make_page(read_runs(paths), opening=opening)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page.html, encoding="utf-8", newline="\n")
    return Written(out, tuple(write_png(plot, out.with_suffix("")) for plot in page.plots) if png else (), page.missing)


def write_png(plot: Plot, folder: Path) -> Path:
    """Write one plot as a PNG with its title, on white and at twice the resolution, for use on a slide."""
    folder.mkdir(parents=True, exist_ok=True)
    title = {"text": plot.title, "subtitle": plot.hint} if plot.hint else plot.title
    spec = {**plot.spec(), "width": WIDE if plot.wide else WIDTH, "title": title, "padding": 16}
    config = {**LIGHT, "background": "white"}
    file = folder / f"{plot.name}.png"
    file.write_bytes(vl_convert.vegalite_to_png(spec, scale=2, config=config, allowed_base_urls=[]))
    return file
