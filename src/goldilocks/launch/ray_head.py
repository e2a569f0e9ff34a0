"""Ray's own processes, started by a child of the driver while the driver imports torch and verl.

Ray needs 3 to 5 seconds until its processes know of each other, and the driver's imports need as long. The child holds
Ray and ends with the driver, and Ray's processes end with the child: the kernel sees to both.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from goldilocks.launch.prefork import NO_SPARE_WORKERS, end_with_parent

# verl sets it before it imports Ray: Ray would pack and upload the folder of a `uv run`.
AS_VERL = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}

# The arguments of ``ray.init`` that are the driver's own; all others are for the process that starts Ray.
OWN = (
    "runtime_env",
    "namespace",
    "job_config",
    "log_to_driver",
    "logging_level",
    "logging_config",
    "configure_logging",
    "_node_ip_address",
)


class RayHead:
    """``head = RayHead(config)``, then import, then ``head.join(config)``: verl connects to the Ray that is there."""

    def __init__(self, config: DictConfig, listener: socket.socket | None = None) -> None:
        """Start Ray. ``listener`` is the driver's: in the child it would take clients that nobody answers."""
        given: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
        driver = os.getpid()
        self._answer, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()  # Ctrl-C in a terminal is the driver's
                end_with_parent()
                if listener is not None:
                    listener.close()
                if os.getppid() == driver:  # else the driver ended before the kernel was asked
                    _hold({key: value for key, value in given.items() if key != "runtime_env"}, answer)
            finally:  # the child must not return into the driver's code
                os._exit(1)
        os.close(answer)

    def join(self, config: DictConfig) -> None:
        """Wait until Ray is there, and have ``config`` connect to it.

        Where Ray did not start, ``config`` stays: verl starts Ray once more, or says why it cannot.
        """
        with open(self._answer, encoding="utf-8") as stream:
            address = stream.read()
        if not address:
            os.kill(self.pid, signal.SIGKILL)  # Ray's processes end with it
            os.waitpid(self.pid, 0)
            return
        with open_dict(config.ray_kwargs):
            given = config.ray_kwargs.ray_init
            config.ray_kwargs.ray_init = {**{key: given[key] for key in OWN if key in given}, "address": address}


def possible() -> bool:
    """Return whether the kernel ends a process with its parent."""
    return sys.platform == "linux"


def _hold(ray_init: Mapping[str, Any], answer: int) -> None:
    """Start Ray, say where it is, and hold it until this process is ended."""
    # A spare worker has no runtime environment, and verl's workers have one: none of them would be used.
    os.environ |= {**NO_SPARE_WORKERS, **AS_VERL, **os.environ}
    with open(answer, "w", encoding="utf-8") as stream:
        try:
            import ray

            started: Any = ray.init(**{**ray_init, "log_to_driver": False})
            stream.write(started.address_info["gcs_address"])
        except BaseException:  # Ray ends a process that cannot start it by SystemExit
            traceback.print_exc()
            return
    while True:
        signal.pause()
