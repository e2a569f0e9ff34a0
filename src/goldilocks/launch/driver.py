"""The process that ``goldilocks train`` starts and watches: ``python -m goldilocks.launch.driver RUN_DIRECTORY``.

It does what verl's ``main_ppo`` does, with a config that is already composed. Invariants: it ends when its parent ends,
and when it fails it writes the reason to the run directory in one line.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from goldilocks.launch import on_trl, prefork, ray_head
from goldilocks.launch.compile_cache import compile_cache
from goldilocks.launch.machine import NodeLost, is_private, naming_lost_nodes
from goldilocks.launch.preflight import check_prompts, check_settings
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
        with compile_cache(config, run.path):
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


def _start_ray(config: DictConfig) -> ray_head.RayHead | None:
    """Start Ray, and meanwhile import what its workers need; None where verl has to start Ray."""
    listener = prefork.listen(config.ray_kwargs.ray_init._temp_dir)
    head = ray_head.RayHead(config, listener) if ray_head.possible() else None
    if listener is not None:
        prefork.serve(listener)
    return head


def train(config: DictConfig, head: ray_head.RayHead | None) -> None:
    """Train as verl's own ``main_ppo`` does."""
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from goldilocks.verl.checks import check_run

    check_run(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    if head is not None:
        head.join(config)
    with naming_lost_nodes(_task_runner(config)) as watched:
        run_ppo(config, task_runner_class=watched)


def _task_runner(config: DictConfig) -> Any:
    if config.trainer.use_v1:
        from verl.trainer.main_ppo import TaskRunnerV1

        return TaskRunnerV1
    from verl.trainer.main_ppo_v0 import TaskRunner

    return TaskRunner


def explain(error: BaseException, run: RunDir) -> str:
    """Return the reason in one line. torch does not report a full disk, so the disk is checked too."""
    from goldilocks.verl.dispatch.failures import reason

    # These messages are for the user: they get no type and no place.
    line = " ".join((str(error) if type(error) in (ValueError, NodeLost) else reason(error)).split())
    full = run.full_disk()
    return f"{full}: {line}" if full else line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
