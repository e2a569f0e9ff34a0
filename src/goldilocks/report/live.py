"""Serves the report on this machine while a run is training; the page asks for newer versions and updates itself.

A version is a digest of the sizes and times of the runs' files, computed when the page asks. The page is rendered only
if the version has changed. The server listens on 127.0.0.1 and answers only requests with that host, so that no other
site's page can read the runs through the browser.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from goldilocks.report.page import make_page
from goldilocks.report.run import METRICS, read_runs
from goldilocks.runs.checkpoints import checkpoints
from goldilocks.runs.records import dump_files

HOST = "127.0.0.1"
PORT = 8378


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
