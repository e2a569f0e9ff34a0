"""The table is written where the packages for pictures are not installed."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from pathlib import Path

class WithoutPictures:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("altair", "vl_convert", "jinja2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, WithoutPictures())
from unit.compare.arms import result, study
from goldilocks.compare.command import _show, _write
from goldilocks.compare.folder import StudyFolder
from goldilocks.compare.result import Results
from goldilocks.compare.table import make_table

chosen = study()
results = Results((), (result("grpo"), result("dapo")))
with StudyFolder.open(Path(sys.argv[1]), chosen) as folder:
    table = make_table(chosen, results)
    _write(chosen, results, table, folder)
    _show(table, folder)
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
    assert "goldilocks-rl[report]" in done.stderr
    assert (tmp_path / "table.md").exists()
    assert "table.json" in done.stdout
    assert "curves.png" not in done.stdout
