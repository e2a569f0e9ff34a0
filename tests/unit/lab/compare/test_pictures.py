"""The study's page; and the table is written where the packages for pictures are not installed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from unit.lab.compare.arms import result, study

from goldilocks.lab.compare.pictures import make_opening, write_pictures
from goldilocks.lab.compare.study import Results, StudyFolder
from goldilocks.lab.compare.table import make_table

LEVELS = ((1, 0.5, 0.9), (2, 0.1, 0.3))
NOT_AT_ALL = ((0, 0.2), (1000, 0.2))
SLOW = ((0, 0.2), (1000, 0.6))
QUICK = ((0, 0.2), (500, 0.7), (1000, 0.7))


@pytest.fixture
def made():
    """Four seeds, of which ``dapo`` learns nothing in the last: it may not reach what GRPO has at the end."""
    chosen = study(seeds=4, against=("grpo", "dapo"))
    reported = [result("grpo", SLOW, seed=seed, levels=LEVELS) for seed in (1, 2, 3, 4)]
    reported += [result("dapo", QUICK if seed < 4 else NOT_AT_ALL, seed=seed, levels=LEVELS) for seed in (1, 2, 3, 4)]
    results = Results((), tuple(reported))
    return chosen, results, make_table(chosen, results)


def test_the_page_opens_with_the_study_and_its_arms_are_folded(made, tmp_path):
    chosen, results, table = made
    for arm in chosen.reported_arms({"grpo": {}, "dapo": {}}):
        (tmp_path / arm.name).mkdir()
        (tmp_path / arm.name / "metrics.jsonl").write_text('{"step": 1, "data": {"response_length/mean": 9}}\n')
    with StudyFolder.open(tmp_path, chosen) as folder:
        write_pictures(chosen, results, table, folder)
    study_part, folded = (tmp_path / "report.html").read_text().split('<details class="fold" id="arms">')
    headings = re.findall(r"<h2>(.*?)</h2>", study_part)
    assert headings == ["Result", "Against grpo", "Against dapo", "Accuracy by level", "Cost and tuning"]
    assert re.findall(r'data-plot="(.*?)"', study_part) == ["curves", "curves-tokens", "curves-seconds"]
    assert "<h2>The arms of seeds 1 to 4</h2>" in folded
    assert re.findall(r'data-plot="(.*?)"', folded) == ["lengths"]
    assert folded.count("config.yaml is not there") == 1, "what all arms lack is said once"
    assert "config.yaml is not there" not in study_part
    pngs = {file.name for file in (tmp_path / "report").iterdir()}
    assert {"curves.png", "curves-tokens.png", "curves-seconds.png"} <= pngs


def test_without_levels_there_is_less_to_show():
    chosen = study()
    results = Results((), (result("grpo"), result("dapo", NOT_AT_ALL)))
    opening = make_opening(results, make_table(chosen, results), "The arms")
    assert [section.name for section in opening.sections] == ["study", "against-1", "spent"]
    assert [plot.name for section in opening.sections for plot in section.plots] == [
        "curves",
        "curves-tokens",
        "curves-seconds",
    ]


CODE = """
import sys
from pathlib import Path

class WithoutPictures:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("altair", "vl_convert", "jinja2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, WithoutPictures())
from unit.lab.compare.arms import result, study
from goldilocks.lab.compare.command import _show, _write
from goldilocks.lab.compare.study import StudyFolder
from goldilocks.lab.compare.study import Results
from goldilocks.lab.compare.table import make_table

chosen = study()
results = Results((), (result("grpo"), result("dapo")))
with StudyFolder.open(Path(sys.argv[1]), chosen) as folder:
    table = make_table(chosen, results)
    _write(chosen, results, table, folder)
    _show(table, folder.path)
"""


def test_without_the_packages_for_pictures_the_table_is_written_and_the_extra_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path)],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no picture and no report: No module named 'altair'" in done.stderr
    assert "pip install '.[report]'" in done.stderr
    assert (tmp_path / "table.md").exists()
    assert "table.json" in done.stdout
    assert "curves.png" not in done.stdout
