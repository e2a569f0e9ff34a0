"""``goldilocks report``: one HTML file of a run directory or several, with PNGs beside it, or a page served live.

While a run is training, the page asks this machine for newer versions and updates itself. A version is a digest of the
sizes and times of the runs' files, computed when the page asks. The page is rendered only if the version has changed.
The server listens on 127.0.0.1 and answers only requests with that host, so that no other site's page can read the runs
through the browser.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import vl_convert

from goldilocks.errors import require
from goldilocks.lab.report.draw import LIGHT, Plot
from goldilocks.lab.report.page import Opening, make_page
from goldilocks.lab.report.run import METRICS, read_runs
from goldilocks.runs.checkpoints import checkpoints
from goldilocks.runs.records import dump_files

WIDTH, WIDE = 560, 900
FRAME = 720  # pixels of a page in a notebook
EPILOG = """\
examples:
  goldilocks report runs/tiny                      runs/tiny/report.html, PNGs in runs/tiny/report/
  goldilocks report runs/a runs/b --out ab.html    both, one over the other
  goldilocks report --live runs/tiny               in the browser while it trains
"""
HOST = "127.0.0.1"
PORT = 8378


@dataclass(frozen=True)
class Written:
    """The files of a report, and what it could not show."""

    page: Path
    pngs: tuple[Path, ...]
    missing: tuple[str, ...]

    def _repr_html_(self) -> str:
        """Show the page in a notebook, which finds it beside itself or below."""
        page = escape(Path(os.path.relpath(self.page)).as_posix())
        frame = f'<iframe src="{page}" width="100%" height="{FRAME}" style="border: 0"></iframe>'
        return f'{frame}<p><a href="{page}">{page}</a></p>'


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


class LiveReport:
    """Renders the current page of the runs."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._lock = threading.Lock()
        self._made = ("", "")
        self.page()  # an unreadable run fails here and not in the browser

    def version(self) -> str:
        """Return a digest that changes whenever a run has more to show."""
        digest = hashlib.sha256()
        for path in self._paths:
            beliefs = [file for _, file in checkpoints(path / "checkpoints")[-1:]]
            for file in (path / METRICS, *dump_files(path / "rollouts")[-1:], *beliefs):
                if file.is_file():
                    stat = file.stat()
                    digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> str:
        """Return the page; it is rendered again only if there is more to show."""
        with self._lock:
            version = self.version()
            if self._made[0] != version:
                self._made = (version, make_page(read_runs(self._paths), live=version).html)
            return self._made[1]


class LiveServer(ThreadingHTTPServer):
    """Serves the page at ``/`` and its current version at ``/version``."""

    daemon_threads = True

    def __init__(self, report: LiveReport, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.report = report

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._answer("text/html", self.server.report.page())
        elif self.path == "/version":
            self._answer("text/plain", self.server.report.version())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a line per request would hide the command's own output."""
