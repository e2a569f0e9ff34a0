"""Two nodes of one Ray: two raylets on this machine, each with an address, a folder and one logical device of its own.

One test, since each of its parts needs the nodes: the doctor looks at both, dapo trains on both, a killed node ends the
run with its reason, and the same command goes on from the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
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

from goldilocks.engine.cpu import platform_env

from .conftest import PATIENCE_S, SMALL

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(4), pytest.mark.timeout(4 * PATIENCE_S)]

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

    def start(self, address: str, **env: str) -> None:
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
                env=environment(**self.env, **env),
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


def environment(**more: str) -> dict[str, str]:
    own = {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **platform_env("cpu"), **own, **more}


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


def start(nodes: Nodes, arithmetic: Path, *words: str) -> subprocess.Popen[str]:
    """``goldilocks …`` on the nodes."""
    return subprocess.Popen(
        [sys.executable, "-m", "goldilocks.cli", *words],
        env=environment(**nodes.env, GOLDILOCKS_TASK=str(arithmetic)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its status and everything that it said."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out + err


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.2)


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [record["step"] for record in map(json.loads, lines) if record["step"] > 0]


def test_two_nodes_train_and_a_killed_one_ends_the_run_which_goes_on(
    nodes: Nodes, arithmetic: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"  # another release of a package that this node finds before the real one
    (other / "verl-0.9.0.dist-info").mkdir(parents=True)
    (other / "verl-0.9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.0\n")
    path = os.pathsep.join(filter(None, [str(other), os.environ.get("PYTHONPATH")]))
    doctor = ("doctor", "--address", nodes.address, "--runs", str(tmp_path))

    nodes.start(SECOND, PYTHONPATH=path)
    status, said = end(start(nodes, arithmetic, *doctor))
    assert status == 1, said
    assert f"FAILS node {SECOND}  verl 0.9.0, on other nodes 0.9.1\n" in said
    nodes.kill(SECOND)

    nodes.start(SECOND)
    status, said = end(start(nodes, arithmetic, *doctor))
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
    process = start(nodes, arithmetic, *words, "trainer.total_training_steps=1000")  # far more than before the kill
    wait_for(latest, process)
    nodes.kill(SECOND)
    status, said = end(process)
    assert status == 1, said
    (reason,) = (line for line in said.splitlines() if line.startswith("goldilocks: the run failed: "))
    assert reason.startswith(f"goldilocks: the run failed: node {SECOND} died: ")

    saved = int(latest.read_text())
    nodes.start(SECOND)
    status, said = end(start(nodes, arithmetic, *words, f"trainer.total_training_steps={saved + 2}"))
    assert status == 0, said
    assert steps(run)[-2:] == [saved + 1, saved + 2]
