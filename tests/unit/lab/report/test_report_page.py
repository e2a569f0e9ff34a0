"""The page and what the command says: one file, nothing in it but text from the data, everything missing named."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from unit.lab.report.run_directories import HOSTILE

from goldilocks.cli import main
from goldilocks.lab.report.page import Page, make_page, write_png
from goldilocks.lab.report.run import read_runs


class Elements(HTMLParser):
    """Every tag with its attributes, and the content of every script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def made(dapo: Path, pilot: Path) -> Page:
    return make_page(read_runs([dapo, pilot]))


@pytest.fixture(scope="module")
def elements(made: Page) -> Elements:
    return Elements(made.html)


def test_the_page_needs_nothing_beside_it(elements: Elements) -> None:
    for tag, attributes in elements.tags:
        assert tag not in {"link", "iframe", "object", "embed", "img", "base"}
        assert "src" not in attributes
        assert "href" not in attributes


def test_data_cannot_leave_its_place(made: Page, elements: Elements) -> None:
    """The hostile prompt and answers add no element: three scripts, ours, and no handler anywhere."""
    assert len(elements.scripts) == 3
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
    assert html.escape("<script>alert(3)</script>", quote=False) in made.html.replace("&#34;", '"')


def test_the_embedded_data_are_what_was_put_in(elements: Elements) -> None:
    data = json.loads(elements.scripts[0])
    assert HOSTILE in [row[1] for row in data["prompts"]]
    assert [run["name"] for run in data["runs"]] == ["dapo", "pilot"]
    drawn = {attributes["data-plot"] for _, attributes in elements.tags if "data-plot" in attributes}
    assert drawn == set(data["plots"])


def test_only_the_page_s_own_scripts_may_run(made: Page, elements: Elements) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', made.html)
    assert policy is not None
    allowed = re.findall(r"'sha256-([^']+)'", policy[1])
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in elements.scripts[1:]]
    assert allowed == hashes
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]


def test_a_run_s_name_is_text_too(tmp_path: Path) -> None:
    run = tmp_path / "<b onclick=alert(4)>"
    (run / "rollouts").mkdir(parents=True)
    assert "<b onclick" not in make_page(read_runs([run])).html


def test_a_report_of_one_run_lies_in_it(dapo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep/er/report.html"
    assert main(["report", str(dapo), "--out", str(out), "--no-png"]) == 0
    assert capsys.readouterr().out == f"page     {out} ({out.stat().st_size / 1e6:.1f} MB)\n"
    assert out.read_text().startswith("<!doctype html>")
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


def test_what_is_missing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rollouts").mkdir()
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"page     {tmp_path}/report.html")
    assert "missing  config.yaml is not there" in printed
    assert "missing  accounts/*_tokens: not logged" in printed


def test_what_all_runs_lack_is_said_once_and_names_none(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "other", "third")]
    for run in runs:
        (run / "rollouts").mkdir(parents=True)
    (runs[0] / "config.yaml").write_text("{}")
    made = make_page(read_runs(runs))
    assert "other, third: config.yaml is not there" in made.missing
    assert "accounts/*_tokens: not logged" in made.missing
    assert [line for line in made.missing if "metrics.jsonl is not there" in line] == [
        "metrics.jsonl is not there: no step has been logged (trainer.logger needs 'file')"
    ]
    assert made.html.count("metrics.jsonl is not there") == 1
    assert made.html.count("no answers were dumped") == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["nowhere"],
            "goldilocks: RUN='nowhere' is not accepted: a run directory, as goldilocks train makes it: "
            "with config.yaml, metrics.jsonl, rollouts or checkpoints\n",
        ),
        ([".", "--out", "x.pdf"], "goldilocks: --out='x.pdf' is not accepted: a file name that ends in .html\n"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: list[str], error: str, refused: Callable[[list[str]], str]) -> None:
    assert refused(["report", *words]) == error


def test_a_plot_is_a_png_of_its_own(made: Page, tmp_path: Path) -> None:
    file = write_png(next(one for one in made.plots if one.wide), tmp_path / "plots")
    assert file == tmp_path / "plots/tokens-by-account.png"
    assert file.read_bytes().startswith(b"\x89PNG")
    width = int.from_bytes(file.read_bytes()[16:20], "big")
    assert 1800 < width < 2400  # twice as fine as the page, with its axis
