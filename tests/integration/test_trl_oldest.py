"""The other end of the range of TRL that is supported: the tests of the installed TRL, with the oldest in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

OLDEST = "1.14.0"
TESTS = Path(__file__).parents[1]
SAME = [TESTS / "unit" / "trl", TESTS / "integration" / "test_trl.py"]

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(3), pytest.mark.timeout(1800)]


def run(*words: str | Path, first: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with ``first`` in front of everything that is installed."""
    path = os.pathsep.join(map(str, (first, TESTS, *filter(None, [os.environ.get("PYTHONPATH")]))))
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


@pytest.fixture
def oldest(tmp_path: Path) -> Path:
    """The oldest TRL in a folder of its own; what it needs is what the newest needs."""
    pip = run("-m", "pip", "install", "--no-deps", "--target", tmp_path, f"trl=={OLDEST}", first=tmp_path)
    if pip.returncode:
        pytest.skip(f"pip cannot get trl {OLDEST}: {pip.stderr.strip().splitlines()[-1]}")
    return tmp_path


def test_the_oldest_trl_passes_the_tests_of_the_installed_one(oldest: Path) -> None:
    version = "from importlib.metadata import version; import trl; print(version('trl'), trl.__file__)"
    assert run("-c", version, first=oldest).stdout.split() == [OLDEST, str(oldest / "trl" / "__init__.py")]
    found = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *SAME, first=oldest)
    assert found.returncode == 0, found.stdout[-5000:]
    assert " passed" in found.stdout
