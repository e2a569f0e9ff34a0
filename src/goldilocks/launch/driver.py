"""The process that ``goldilocks train`` starts and watches: ``python -m goldilocks.launch.driver RUN_DIRECTORY``.

It does what verl's ``main_ppo`` does, with a config that is already composed. Invariant: when it fails it writes the
reason to the run directory in one line.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from goldilocks.launch import on_trl
from goldilocks.launch.machine import NodeLost, naming_lost_nodes
from goldilocks.launch.preflight import check_prompts
from goldilocks.runs.files import RunDir
from goldilocks.verl.checks import check_settings


def main(folder: str) -> int:
    """Train with the run directory's config; return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    run = RunDir(Path(folder))
    config = OmegaConf.load(run.config)
    assert isinstance(config, DictConfig)
    try:
        check_settings(config)
        check_prompts(config)
        if on_trl.chosen(config):
            on_trl.train(config, run.path)
        else:
            train(config)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        with contextlib.suppress(OSError):  # the disk may be full, which RunDir.failure finds
            run.reason.write_text(explain(error, run))
        raise
    return 0


def train(config: DictConfig) -> None:
    """Train as verl's own ``main_ppo`` does."""
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from goldilocks.verl.checks import check_run

    check_run(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
