"""docs/life-of-a-rollout.md names the files that a rollout of a real launch passes, and no others."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from .conftest import Launch
from .test_trainer import FILTER, MODE, assert_trained

pytestmark = [pytest.mark.integration, pytest.mark.slow]

DRIVER = "goldilocks.drive.driver"
PAGE = Path(__file__).parents[2] / "docs/life-of-a-rollout.md"

# Python imports it at the start of each process: every function of ours first notes its file and the time.
TRACER = """
import ast, builtins, json, os, sys, threading, time
from importlib.machinery import PathFinder, SourceFileLoader

noted = {}

def note(file, name):
    if not noted:
        threading.Thread(target=write, daemon=True).start()
    noted.setdefault((file, name), set()).add(round(time.time(), 3))

def write():
    path = os.path.join(os.environ["TRACE_FOLDER"], f"{os.getpid()}.json")
    while True:
        time.sleep(0.5)
        with open(path + ".new", "w") as out:
            json.dump([[*place, sorted(times)] for place, times in list(noted.items())], out)
        os.replace(path + ".new", path)

class Noting(SourceFileLoader):
    def get_code(self, name):
        tree = ast.parse(self.get_data(self.path))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                call = ast.parse(f"__import__('builtins').noted_call({name!r}, {node.name!r})").body
                at = 1 if ast.get_docstring(node) is not None else 0
                node.body[at:at] = [ast.copy_location(one, node.body[-1]) for one in call]
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

class Finder:
    def find_spec(name, path=None, target=None):
        if not name.startswith("goldilocks"):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Noting(name, spec.origin)
        return spec

builtins.noted_call = note
sys.meta_path.insert(0, Finder)
"""


def named() -> set[str]:
    rows = re.findall(r"^\| \w+ \| (`.*`) \|$", PAGE.read_text(), re.MULTILINE)
    files = [file for row in rows for file in re.findall(r"`(\S+)\.py`", row)]
    return {f"goldilocks.{file.replace('/', '.')}" for file in files}


def test_a_rollout_passes_the_files_that_the_page_names(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What any process calls from the moment that the second batch is asked for until the fourth is."""
    (tmp_path / "trace").mkdir()
    (tmp_path / "sitecustomize.py").write_text(TRACER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TRACE_FOLDER", str(tmp_path / "trace"))
    assert_trained(launch(MODE, FILTER, "trainer.total_training_steps=5"), 1, 2, 3, 4, 5)
    calls = [call for file in (tmp_path / "trace").glob("*.json") for call in json.loads(file.read_text())]
    begins = sorted(time for name, function, times in calls if (name, function) == (DRIVER, "take") for time in times)
    passed = {name for name, _, times in calls if any(begins[1] <= time < begins[3] for time in times)}
    assert passed == named()
