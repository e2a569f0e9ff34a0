"""verl's V0 task runner with ``RayPPOTrainerWithSampling``.

A module, so that Ray sends the class by its name. A class of a function or of ``__main__`` is sent by value, with a
copy of verl's names in it, which the patch does not reach: verl's own trainer would train.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer import main_ppo_v0

from goldilocks.verl.plugin import named


class SamplingTaskRunner(main_ppo_v0.TaskRunner.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """Runs in a process of its own, in which verl's name of the trainer class is bound to ours."""

    def run(self, config: Any) -> None:
        patch = named("v0-trainer")
        if not patch.apply():
            raise RuntimeError(f"{patch.targets[0]} has changed: verl's V0 task runner cannot be given our trainer")
        super().run(config)


SamplingTaskRunnerActor = ray.remote(SamplingTaskRunner)
