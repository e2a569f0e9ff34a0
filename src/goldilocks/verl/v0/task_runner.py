"""verl's V0 task runner, whose trainer is ours."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer import main_ppo_v0

from goldilocks.verl.v0.trainer import RayPPOTrainerWithSampling


class SamplingTaskRunner(main_ppo_v0.TaskRunner.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """Runs in a process of its own, where verl's name for the trainer's class stands for ours."""

    def run(self, config: Any) -> None:
        """Train."""
        vars(main_ppo_v0)["RayPPOTrainer"] = RayPPOTrainerWithSampling
        super().run(config)


SamplingTaskRunnerActor = ray.remote(SamplingTaskRunner)
