"""``goldilocks report``: a run directory, or several, as one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from goldilocks.report.live import PORT, LiveReport, LiveServer
from goldilocks.report.write import Written, write_report

EPILOG = """\
examples:
  goldilocks report runs/tiny                      runs/tiny/report.html, PNGs in runs/tiny/report/
  goldilocks report runs/a runs/b --out ab.html    both, one over the other
  goldilocks report --live runs/tiny               in the browser while it trains
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
    _tell(write_report(args.runs, out, png=not args.no_png))
    return 0


def serve(runs: list[Path], port: int) -> int:
    """Serve the report until Ctrl-C."""
    report = LiveReport(runs)
    with LiveServer(report, port) as server:
        try:
            print(f"live at {server.address} (Ctrl-C ends it)", flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("ended")
    return 0


def _tell(written: Written) -> None:
    print(f"page     {written.page} ({written.page.stat().st_size / 1e6:.1f} MB)")
    if written.pngs:
        print(f"plots    {written.pngs[0].parent}/ ({len(written.pngs)} PNGs)")
    for line in written.missing:
        print(f"missing  {line}")
