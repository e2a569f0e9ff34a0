"""Ray's processes beside the driver's imports, with a stand-in for Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from goldilocks.launch.driver import RayHead
from goldilocks.launch.prefork import NO_SPARE_WORKERS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process that ends with its parent is Linux's")

WAIT_S = 60.0


def settings() -> DictConfig:
    ray_init = {"address": "local", "num_cpus": 3, "_node_ip_address": "127.0.0.1", "runtime_env": {"env_vars": {}}}
    return OmegaConf.create({"ray_kwargs": {"ray_init": ray_init}})


@contextlib.contextmanager
def joined(config: DictConfig, listener: socket.socket | None = None) -> Iterator[None]:
    """Start and join a Ray whose child goes on until the end of the block."""
    head = RayHead(config, listener)
    if listener is not None:
        listener.close()  # as the driver does
    head.join(config)
    yield
    os.kill(head.pid, signal.SIGKILL)  # it holds Ray until it is ended
    os.waitpid(head.pid, 0)


def use(monkeypatch: pytest.MonkeyPatch, init: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))


def test_the_driver_connects_and_keeps_what_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**given: Any) -> Any:  # the address tells the test what came here
        spare = {os.environ[name] for name in (*NO_SPARE_WORKERS, "RAY_ENABLE_UV_RUN_RUNTIME_ENV")}
        return SimpleNamespace(address_info={"gcs_address": f"{given} {spare}"})

    use(monkeypatch, init)
    config = settings()
    with joined(config):
        pass
    started = {"address": "local", "num_cpus": 3, "_node_ip_address": "127.0.0.1", "log_to_driver": False}
    assert config.ray_kwargs.ray_init == {
        "address": f"{started} {set('0')}",
        "_node_ip_address": "127.0.0.1",
        "runtime_env": {"env_vars": {}},
    }


@pytest.mark.parametrize("error", [RuntimeError("no raylet"), SystemExit(1)])
def test_where_ray_does_not_start_verl_starts_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: BaseException
) -> None:
    def init(**given: Any) -> Any:
        raise error

    use(monkeypatch, init)
    config = settings()
    head = RayHead(config)
    head.join(config)
    assert config == settings()
    assert type(error).__name__ in capfd.readouterr().err  # the log says why
    assert not psutil.pid_exists(head.pid)


ENDS = """
import os, signal, sys, types
from omegaconf import OmegaConf
from goldilocks.launch.driver import RayHead
config = OmegaConf.create({"ray_kwargs": {"ray_init": {"address": "local"}}})
if sys.argv[1] == "starting":
    sys.modules["ray"] = types.SimpleNamespace(init=lambda **given: signal.pause())
    head = RayHead(config)
else:
    there = types.SimpleNamespace(address_info={"gcs_address": "127.0.0.1:1"})
    sys.modules["ray"] = types.SimpleNamespace(init=lambda **given: there)
    head = RayHead(config)
    head.join(config)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["starting", "started"])
def test_ray_ends_with_a_driver_that_is_killed(when: str) -> None:
    # The child holds the driver's output open: it has ended when there is nothing more to read.
    done = subprocess.run([sys.executable, "-c", ENDS, when], capture_output=True, timeout=WAIT_S)
    assert done.returncode == -9
    assert done.stderr == b""


def test_the_child_does_not_hold_the_drivers_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, lambda **given: SimpleNamespace(address_info={"gcs_address": "127.0.0.1:1"}))
    monkeypatch.chdir(tmp_path)  # a socket's path has 107 characters at most
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen()
    with joined(settings(), listener), socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect("socket")
