"""``examples/tour.ipynb`` runs from its first cell to its last, and shows what is saved in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
RUN = """
import ast, json, sys

cells, shown, names = json.load(open(sys.argv[1])), [], {"__name__": "__main__"}
for cell in cells:
    *statements, last = ast.parse(cell).body
    exec(compile(ast.Module(statements, []), "<cell>", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
json.dump(shown, open(sys.argv[2], "w"))
"""


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]


def saved(cell: dict[str, Any]) -> str:
    """The last output of a cell, as a notebook shows it."""
    data = cell["outputs"][-1]["data"]
    return "".join(data.get("text/html") or data["text/plain"])


def test_the_tour_shows_what_is_saved_in_it(tmp_path: Path) -> None:
    (tmp_path / "cells.json").write_text(json.dumps(["".join(cell["source"]) for cell in cells()]))
    words = [sys.executable, "-c", RUN, "cells.json", "shown.json"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    simulated, collector, rewards, accounts, report = json.loads((tmp_path / "shown.json").read_text())
    known = [saved(cell) for cell in cells()]
    assert [simulated.count(f">{name}</td>") for name in ("grpo", "dapo", "thompson")] == [2, 2, 2]
    assert collector == known[1]
    assert rewards == " ".join(known[2].split())
    assert ">trained</td>" in accounts
    assert report == known[4]
    assert "<html" in (tmp_path / "tour" / "report.html").read_text()


def test_no_output_of_the_tour_names_a_machine_or_a_warning() -> None:
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"execute_result"}
    assert "site-packages" not in TOUR.read_text()
    assert " at 0x" not in TOUR.read_text()
