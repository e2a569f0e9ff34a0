"""``goldilocks report``: one HTML file of a run directory or several, and its plots as PNGs in a folder beside it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import vl_convert

from goldilocks.errors import require
from goldilocks.report.live import PORT, LiveReport, LiveServer
from goldilocks.report.page import Opening, make_page
from goldilocks.report.run import read_runs
from goldilocks.report.sections import Plot
from goldilocks.report.theme import LIGHT

WIDTH, WIDE = 560, 900
EPILOG = """\
examples:
  goldilocks report runs/tiny                      runs/tiny/report.html, PNGs in runs/tiny/report/
  goldilocks report runs/a runs/b --out ab.html    both, one over the other
  goldilocks report --live runs/tiny               in the browser while it trains
"""


@dataclass(frozen=True)
class Written:
    """The files of a report, and what it could not show."""

    page: Path
    pngs: tuple[Path, ...]
    missing: tuple[str, ...]


def write_report(paths: Sequence[Path], out: Path, *, png: bool = True, opening: Opening | None = None) -> Written:
    """Write the report of these run directories to ``out``, and PNGs to the folder of that name without ``.html``."""
    require(out.suffix == ".html", "--out", str(out), "a file name that ends in .html")
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="a run directory, as goldilocks train makes it")
    add("--out", metavar="FILE", type=Path, help="the page (default: RUN/report.html, or report.html for several runs)")
    add("--no-png", action="store_true", help="write the page alone")
    add("--live", action="store_true", help="serve the page on 127.0.0.1 and keep it up to date, until Ctrl-C")
    add("--port", metavar="N", type=int, default=PORT, help="for --live; 0: any that is free (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the report, or serve it."""
    if args.live:
        return serve(args.runs, args.port)
    out = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html"))
    written = write_report(args.runs, out, png=not args.no_png)
    print(f"page     {written.page} ({written.page.stat().st_size / 1e6:.1f} MB)")
    if written.pngs:
        print(f"plots    {written.pngs[0].parent}/ ({len(written.pngs)} PNGs)")
    for line in written.missing:
        print(f"missing  {line}")
    return 0


def serve(runs: list[Path], port: int) -> int:
    """Serve the report until Ctrl-C."""
    with LiveServer(LiveReport(runs), port) as server:
        try:
            print(f"live at {server.address} (Ctrl-C ends it)", flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("ended")
    return 0
