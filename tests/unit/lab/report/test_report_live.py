"""The live report: served on this machine alone, newer when the run is, ended by Ctrl-C."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from goldilocks.cli import main
from goldilocks.lab.report.page import HOST, LiveReport, LiveServer

PATIENCE_S = 300  # for what is sure to happen: a busy machine is not a mistake


@pytest.fixture
def growing(dapo: Path, tmp_path: Path) -> Path:
    """A run of which only the first ten lines of metrics are written."""
    path = tmp_path / "growing"
    path.mkdir()
    lines = (dapo / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:10]))
    return path


@pytest.fixture
def begun(growing: Path) -> Path:
    """A run that has not trained yet: its page is small and soon made."""
    metrics = growing / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    return growing


@contextmanager
def serving(run: Path) -> Iterator[LiveServer]:
    with LiveServer(LiveReport([run]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: LiveServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = HTTPConnection(HOST, server.server_port, timeout=PATIENCE_S)
    connection.request("GET", path, headers={"Host": host or f"{HOST}:{server.server_port}"})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_the_page_follows_the_run(growing: Path, dapo: Path) -> None:
    with serving(growing) as server:
        _, version = get(server, "/version")
        _, page = get(server, "/")
        assert f'data-version="{version}"' in page
        assert get(server, "/version")[1] == version
        shutil.copy(dapo / "metrics.jsonl", growing / "metrics.jsonl")
        _, newer = get(server, "/version")
        assert newer != version
        assert f'data-version="{newer}"' in get(server, "/")[1]


def test_a_page_is_made_once_for_each_version(begun: Path) -> None:
    report = LiveReport([begun])
    assert report.page() is report.page()


def test_other_paths_and_other_sites_get_nothing(begun: Path) -> None:
    with serving(begun) as server:
        assert get(server, "/config.yaml")[0] == 404
        assert get(server, "/", host="evil.example")[0] == 403


def test_a_run_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a run directory"):
        LiveReport([tmp_path / "nowhere"])


def test_a_port_that_is_in_use_is_named(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(begun) as server:
        assert main(["report", "--live", "--port", str(server.server_port), str(begun)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"goldilocks: --port={server.server_port} is not accepted: a free port, or 0 for any")
    assert said.count("\n") == 1


def test_ctrl_c_ends_it_cleanly(begun: Path) -> None:
    command = [sys.executable, "-m", "goldilocks.cli", "report", "--live", str(begun), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert re.fullmatch(r"live at http://127\.0\.0\.1:\d+/ \(Ctrl-C ends it\)\n", first)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, error) == (0, "ended\n", "")
