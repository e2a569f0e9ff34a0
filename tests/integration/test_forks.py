"""What a launch leaves behind is found, however it was started: else the tests could not say that nothing is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from .conftest import PATIENCE_S
from .forks import Drivers, forking

LEAVES = """
from subprocess import DEVNULL, Popen
print(Popen(["sleep", "600"], start_new_session=True, env={}, stdout=DEVNULL, stderr=DEVNULL).pid)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks by pidfd, which is Linux's")
def test_a_process_that_outlives_its_driver_is_found(drivers: Drivers, tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    command, variables = drivers.starts(forking(str(script)))
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    left = psutil.Process(int(done.stdout))
    try:
        assert left in drivers.forked()
    finally:
        left.kill()


def test_a_launch_finds_the_modules_of_its_own_path(drivers: Drivers, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "of_this_launch.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text("import of_this_launch; print(of_this_launch.WORD)")
    command, variables = drivers.starts(forking(str(script)))
    path = os.pathsep.join(filter(None, [str(tmp_path / "modules"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, **variables, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == ["found"]
