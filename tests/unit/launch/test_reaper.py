"""The reaper ends what a supervisor that is gone has started, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from goldilocks.launch.supervisor import RUN, SUPERVISOR, end_processes, processes_of

WAIT_S = 60.0
Start = Callable[..., psutil.Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(run, supervisor)`` starts a process of a run, in a session of its own."""
    started = []

    def run(run: Path, supervisor: int, *command: str) -> psutil.Process:
        env = {**os.environ, RUN: str(run), SUPERVISOR: str(supervisor)}
        process = subprocess.Popen(command or ("sleep", "600"), env=env, start_new_session=True, stdout=subprocess.PIPE)
        started.append(process)
        return psutil.Process(process.pid)

    yield run
    for process in started:
        process.kill()
        process.communicate()


def reaper(run: Path, supervisor: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "goldilocks.launch.supervisor", str(run), str(supervisor)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def test_once_its_input_ends_it_kills_the_run_of_that_supervisor_alone(start: Start, tmp_path: Path) -> None:
    watching = reaper(tmp_path, 1)
    own, started_again, another = start(tmp_path, 1), start(tmp_path, 2), start(tmp_path / "another", 1)
    assert set(processes_of(tmp_path)) == {own, started_again}
    assert watching.poll() is None
    watching.communicate(timeout=WAIT_S)
    assert watching.returncode == 0
    assert not own.is_running() or own.status() == psutil.STATUS_ZOMBIE
    assert list(processes_of(tmp_path)) == [started_again]
    assert list(processes_of(tmp_path / "another")) == [another]


def test_a_process_that_appears_after_the_supervisors_end_is_killed_too(start: Start, tmp_path: Path) -> None:
    watching = reaper(tmp_path, 1)
    assert watching.stdin is not None
    watching.stdin.close()
    start(tmp_path, 1)
    assert watching.wait(WAIT_S) == 0
    assert list(processes_of(tmp_path)) == []


BREEDS = """
import os, sys, time
while True:
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(0.05)
"""


def test_what_a_process_starts_while_it_is_being_killed_does_not_escape(start: Start, tmp_path: Path) -> None:
    start(tmp_path, 1, sys.executable, "-c", BREEDS)
    end_processes(tmp_path, 1)
    assert list(processes_of(tmp_path)) == []


def test_a_process_is_found_while_its_command_replaces_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = subprocess.Popen(["sleep", "600"], env={})  # it never has any: nobody waits for it in the other's place
    started, looks, environ = start(tmp_path, 1), [], psutil.Process.environ

    def at_first_none(process: psutil.Process) -> dict[str, str]:
        if process.pid != started.pid:
            return environ(process)
        looks.append(process)
        return environ(process) if len(looks) > 2 else {}

    monkeypatch.setattr(psutil.Process, "environ", at_first_none)
    try:
        assert list(processes_of(tmp_path)) == [started]
    finally:
        bare.kill()
        bare.communicate()
