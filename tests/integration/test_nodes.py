"""Two nodes of one Ray: two raylets on this machine, each with an address, a folder and one logical device of its own.

One test, since each of its parts needs the nodes: the doctor looks at both, dapo trains on both, a killed node ends the
run with its reason, and the same command goes on from the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from run_files import json_lines

from goldilocks.engine.cpu import platform_env

from .conftest import GOLDILOCKS, PATIENCE_S, SMALL, end, start

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(3), pytest.mark.timeout(4 * PATIENCE_S)]

SECOND = "127.0.0.2"  # every address of 127.0.0.0/8 is this machine


class Nodes:
    """Starts and kills the raylets of a cluster; all of it is ended by process id."""

    def __init__(self, folder: Path) -> None:
        import ray

        self.folder = folder
        self.head = ray.util.get_node_ip_address()  # where a driver looks for its node
        with socket.socket() as probe:
            probe.bind((self.head, 0))
            self.address = f"{self.head}:{probe.getsockname()[1]}"
        token = folder / "token"  # of this cluster alone, whatever the machine has of its own
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str) -> None:
        """Start a node and return once it answers."""
        as_node = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        joins = [f"--address={self.address}"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}"),
            *("--num-gpus=1", "--num-cpus=16", f"--object-store-memory={256 << 20}", "--disable-usage-stats"),
            *(as_node if address == self.head else joins),
            *([f"--temp-dir={self.folder / 'ray'}"] if address == self.head else []),
        ]
        log, deadline = self.folder / f"{address}.log", time.monotonic() + PATIENCE_S
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={**os.environ, **OWN, **self.env},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started[address] = process
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def kill(self, address: str) -> None:
        """SIGKILL the node, its workers too, as a machine that loses power."""
        process = self._started.pop(address)
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in (*psutil.Process(process.pid).children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait()

    def end(self) -> None:
        for address in list(self._started):
            self.kill(address)


OWN = {**platform_env("cpu"), "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="gl", dir="/tmp"))  # short: Ray's sockets lie in it
    cluster = Nodes(folder)
    try:
        cluster.start(cluster.head)
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def start_on(nodes: Nodes, arithmetic: Path, *words: str) -> subprocess.Popen[str]:
    """``goldilocks …`` on the nodes."""
    return start(*GOLDILOCKS, *words, **nodes.env, **OWN, GOLDILOCKS_TASK=str(arithmetic))


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.2)


def test_two_nodes_train_and_a_killed_one_ends_the_run_which_goes_on(
    nodes: Nodes, arithmetic: Path, tmp_path: Path
) -> None:
    nodes.start(SECOND)
    status, said = end(start_on(nodes, arithmetic, "doctor", "--address", nodes.address, "--runs", str(tmp_path)))
    assert status == 0, said
    for address in (nodes.head, SECOND):
        assert f"ok    node {address}  same packages, plug-in live with" in said

    words = (
        *("train", "dapo", *SMALL, "trainer.nnodes=2", f"++ray_kwargs.ray_init.address={nodes.address}"),
        *("trainer.save_freq=1", "trainer.val_before_train=False", "trainer.test_freq=-1"),
        *("--runs", str(tmp_path), "--name", "test"),
    )
    run = tmp_path / "test"
    latest = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    process = start_on(nodes, arithmetic, *words, "trainer.total_training_steps=1000")  # far more than before the kill
    wait_for(latest, process)
    nodes.kill(SECOND)
    status, said = end(process)
    assert status == 1, said
    (reason,) = (line for line in said.splitlines() if line.startswith("goldilocks: the run failed: "))
    assert reason.startswith(f"goldilocks: the run failed: node {SECOND} died: ")

    saved = int(latest.read_text())
    nodes.start(SECOND)
    status, said = end(start_on(nodes, arithmetic, *words, f"trainer.total_training_steps={saved + 2}"))
    assert status == 0, said
    assert [record["step"] for record in json_lines(run / "metrics.jsonl")][-2:] == [saved + 1, saved + 2]
