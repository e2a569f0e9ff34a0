"""``python -m goldilocks.main_ppo …``: verl's own command line, trained with the collector.

On verl's V1 trainer it is ``trainer.v1.trainer_mode=goldilocks``, on V0 (``trainer.use_v1=False``) the class
``RayPPOTrainerWithSampling``. Without a GPU it trains on the CPU. The user's own settings always win.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

from goldilocks.config.recipes import added_or_changed, key_of, quoted
from goldilocks.engine.cpu import PATCHES_VARIABLE, patches_env, platform_env
from goldilocks.launch.machine import ADDRESS, find_device

MODE = "trainer.v1.trainer_mode"


def overrides(words: Sequence[str], *defaults: str, cpu: bool) -> list[str]:
    """Return verl's command line: the defaults that the user has not set, then the user's own words."""
    given = {key_of(word) for word in words}
    added = [word for word in (f"{MODE}=goldilocks", *defaults) if key_of(word) not in given]
    device = ["+device=cpu"] if cpu and "device" not in given else []
    return [*device, *added, *(added_or_changed(word) for word in words)]


def on_cpu(words: Sequence[str]) -> bool:
    """Return whether to train on the CPU: as the user says, else wherever there is no GPU."""
    chosen = next((word.partition("=")[2] for word in words if key_of(word) in ("device", "trainer.device")), None)
    if chosen is not None:
        return chosen == "cpu"
    if "VERL_PLATFORM" in os.environ:
        return os.environ["VERL_PLATFORM"] == "cpu"
    joined = [f"{ADDRESS}={quoted(os.environ['RAY_ADDRESS'])}"] if os.environ.get("RAY_ADDRESS") else []
    return find_device([*joined, *(word for word in words if "=" in word)]) == "cpu"


def main(*defaults: str, module: str = "goldilocks.main_ppo") -> None:
    """Run verl with ``sys.argv``; ``defaults`` are overrides that hold unless the user says otherwise."""
    words = sys.argv[1:]
    cpu = on_cpu(words)
    os.environ.update(patches_env())
    if cpu and os.environ.get("VERL_PLATFORM") != "cpu":
        os.environ.update(platform_env("cpu"))
        if "verl" in sys.modules:  # verl chose its platform while it was imported: begin again
            os.execv(sys.executable, [sys.executable, "-m", module, *words])
    sys.argv[1:] = overrides(words, *defaults, cpu=cpu)
    import hydra

    hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)(train)()


def train(config: Any) -> None:
    """Train as verl's ``main_ppo`` does; our settings are checked before Ray is started."""
    from omegaconf import OmegaConf
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from goldilocks.config.settings import Settings
    from goldilocks.verl.checks import check_entry, check_run, check_v0, in_one_line

    auto_set_device(config)
    # The processes of a Ray that others started do not inherit this environment.
    handed_on = f"ray_kwargs.ray_init.runtime_env.env_vars.{PATCHES_VARIABLE}"
    OmegaConf.update(config, handed_on, patches_env()[PATCHES_VARIABLE], force_add=True)
    with in_one_line():
        check_entry(config, ours=not config.trainer.use_v1)
        check_run(config)
        if not config.trainer.use_v1:
            check_v0(config, Settings.from_config(config))
    # Without the look at our keys that the plug-in adds: it knows no trainer of ours on V0.
    validate = inspect.unwrap(validate_config)
    validate(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    runner: Any = TaskRunnerV1
    if not config.trainer.use_v1:
        from goldilocks.verl.v0.task_runner import SamplingTaskRunnerActor as runner
    run_ppo(config, task_runner_class=runner)


if __name__ == "__main__":
    main()
