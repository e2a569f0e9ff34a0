"""Every script of ``benchmarks/`` can be started: what it imports is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_finds_what_it_imports() -> None:
    code = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); [runpy.run_path(path) for path in sys.argv[1:]]"
    scripts = sorted(map(str, FOLDER.glob("*.py")))
    ran = subprocess.run([sys.executable, "-c", code, str(FOLDER), *scripts], capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]
