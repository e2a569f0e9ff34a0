"""verl's V0 task runner, whose trainer is ours."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer import main_ppo_v0

from goldilocks.verl.patches.table import V0_TRAINER


class SamplingTaskRunner(main_ppo_v0.TaskRunner.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """Runs in a process of its own, in which verl's name of the trainer class is bound to ours."""

    def run(self, config: Any) -> None:
        """Train."""
        if not V0_TRAINER.apply():
            raise RuntimeError(
                f"{V0_TRAINER.target} has changed: this verl's V0 task runner cannot be given our trainer"
            )
        super().run(config)


SamplingTaskRunnerActor = ray.remote(SamplingTaskRunner)
