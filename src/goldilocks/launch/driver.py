"""The process that ``goldilocks train`` starts and watches: ``python -m goldilocks.launch.driver RUN_DIRECTORY``.

It does what verl's ``main_ppo`` does, with a config that is already composed. Invariants: it ends when its parent ends,
and when it fails it writes the reason to the run directory in one line.

Ray's own processes are started by a child of the driver while the driver imports torch and verl: Ray needs 3 to 5
seconds until its processes know of each other, and the driver's imports need as long. The child holds Ray and ends with
the driver, and Ray's processes end with the child: the kernel sees to both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from goldilocks.launch import on_trl, prefork
from goldilocks.launch.machine import NodeLost, is_private, naming_lost_nodes
from goldilocks.launch.preflight import check_prompts, check_settings
from goldilocks.launch.prefork import NO_SPARE_WORKERS, end_with_parent
from goldilocks.runs.files import RunDir


def main(folder: str) -> int:
    """Train with the run directory's config; return the exit status."""
    if sys.platform == "linux":
        prefork.end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = RunDir(Path(folder))
    config = OmegaConf.load(run.config)
    assert isinstance(config, DictConfig)
    try:
        _run(config, run.path)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        with contextlib.suppress(OSError):  # the disk may be full, which RunDir.failure finds
            run.reason.write_text(explain(error, run))
        raise
    return 0


def _run(config: DictConfig, folder: Path) -> None:
    by_trl = on_trl.chosen(config)
    head = _start_ray(config) if is_private(config) and not by_trl else None  # before Ray and verl are imported
    check_settings(config)
    check_prompts(config)
    if by_trl:
        on_trl.train(config, folder)
    else:
        train(config, head)


def _start_ray(config: DictConfig) -> RayHead | None:
    """Start Ray, and meanwhile import what its workers need; None where verl has to start Ray."""
    listener = prefork.listen(config.ray_kwargs.ray_init._temp_dir)
    head = RayHead(config, listener) if sys.platform == "linux" else None  # else no process ends with its parent
    if listener is not None:
        prefork.serve(listener)
    return head


def train(config: DictConfig, head: RayHead | None) -> None:
    """Train as verl's own ``main_ppo`` does."""
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from goldilocks.verl.checks import check_run

    check_run(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    if head is not None:
        head.join(config)
    runner: Any = TaskRunnerV1
    if not config.trainer.use_v1:
        from verl.trainer.main_ppo_v0 import TaskRunner as runner
    with naming_lost_nodes(runner) as watched:
        run_ppo(config, task_runner_class=watched)


def explain(error: BaseException, run: RunDir) -> str:
    """Return the reason in one line. torch does not report a full disk, so the disk is checked too."""
    from goldilocks.verl.dispatch.failures import reason

    # These messages are for the user: they get no type and no place.
    line = " ".join((str(error) if type(error) in (ValueError, NodeLost) else reason(error)).split())
    full = run.full_disk()
    return f"{full}: {line}" if full else line


# -- Ray ---------------------------------------------------------------------------------------------------------------

# verl sets it before it imports Ray: Ray would pack and upload the folder of a `uv run`.
AS_VERL = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}

# The arguments of ``ray.init`` that are the driver's own; all others are for the process that starts Ray.
OWN = (
    "runtime_env", "namespace", "job_config", "log_to_driver", "logging_level", "logging_config", "configure_logging",
    "_node_ip_address",
)  # fmt: skip


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
