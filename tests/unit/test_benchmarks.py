"""Every script of ``benchmarks/`` can be started: what it imports is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


def test_every_benchmark_finds_what_it_imports() -> None:
    code = "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]"
    ran = subprocess.run([sys.executable, "-c", code, *map(str, SCRIPTS)], cwd=SCRIPTS[0].parent, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]
