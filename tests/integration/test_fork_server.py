"""Runs that are forked from a process which has imported everything: they are processes like any other."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("trl")

from goldilocks.launch import fork_server
from goldilocks.launch.fork_server import ForkServer
from goldilocks.launch.prefork import SOCKET, py_executable

from .conftest import PATIENCE_S

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks by pidfd, which is Linux's")

SLEEPER = """
import os, sys, time
try:
    print(os.getpid(), "trl" in sys.modules, sys.argv[1], os.environ["B"], flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    return {**os.environ, "B": "2", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer() as made:
        yield made


def sleeper(server: ForkServer, environment: dict[str, str]) -> tuple[subprocess.Popen[str], list[str]]:
    """Return a command that sleeps, and what it says of itself."""
    command = [*shlex.split(py_executable()), "-m", "sleeper", "word"]
    process = subprocess.Popen(
        command, env={**environment, **server.variables(environment)}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def test_a_run_has_everything_imported_is_interrupted_with_its_command_and_ends_with_the_server(
    server: ForkServer, environment: dict[str, str]
) -> None:
    first, (pid, *said) = sleeper(server, environment)
    assert said == ["True", "word", "2"]
    assert int(pid) != first.pid
    first.send_signal(signal.SIGINT)
    assert first.wait(PATIENCE_S) == 130
    second, (pid, *_) = sleeper(server, environment)
    run = psutil.Process(int(pid))
    server.__exit__(None, None, None)
    second.wait(PATIENCE_S)
    assert psutil.wait_procs([run], timeout=PATIENCE_S)[1] == []


def test_without_a_server_a_run_is_a_process_of_its_own(
    server: ForkServer, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import fails in the server, as one that has touched CUDA would end it."""
    monkeypatch.setattr(fork_server, "NVML", {"PYTHONPATH": "/nowhere", "PYTHONSTARTUP": "", "PYTHONHOME": "/nowhere"})
    assert SOCKET not in server.variables(environment)
    assert server.reason != "it was not started"
    run, (pid, *said) = sleeper(server, environment)
    assert said == ["False", "word", "2"]
    assert int(pid) == run.pid
    run.kill()
    run.wait(PATIENCE_S)


STUDY = """
import os, shlex, subprocess, sys
from pathlib import Path
from goldilocks.compare.arm import EqualCost
from goldilocks.compare.study import StudyFolder
from goldilocks.compare.study import Study
from goldilocks.launch.fork_server import ForkServer
from goldilocks.launch.prefork import py_executable
study = Study(recipes=("grpo",), cost=EqualCost("rollouts", 64), seeds=1)
with StudyFolder.open(Path(sys.argv[1]), study), ForkServer() as server:
    print("locked", flush=True)
    if sys.argv[2:]:
        command = [*shlex.split(py_executable()), "-m", "sleeper", "word"]
        subprocess.run(command, env={**os.environ, **server.variables(os.environ)})
"""


def test_a_study_that_is_killed_leaves_no_run_and_its_folder_to_the_next(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STUDY, str(tmp_path / "study")]
    killed = subprocess.Popen([*command, "run"], env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "locked\n"
    run = psutil.Process(int(killed.stdout.readline().split()[0]))
    killed.kill()
    killed.wait(PATIENCE_S)
    following = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert following.stdout == "locked\n"
    assert psutil.wait_procs([run], timeout=PATIENCE_S)[1] == []
