"""LoRA on verl with our rollout server, which has no adapters: it samples from base and adapter merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Launch
from .killed import dumped_every_step
from .test_trainer import FILTER, MODE

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.runs(2)]

LORA = [
    "actor_rollout_ref.model.lora_rank=4",  # of all layers, and without model.lora.merge, as verl has it by default
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "+goldilocks.on_stale_weights=error",
]


def test_the_server_samples_from_the_adapter_after_every_update_and_in_a_run_that_goes_on(
    launch: Launch, tmp_path: Path
) -> None:
    for steps in ((1, 2), (3, 4)):
        run = launch(
            *(MODE, FILTER, "algorithm.filter_groups.metric=acc", "data.gen_batch_size=12"),
            *LORA,
            *dumped_every_step(tmp_path),
            *(f"trainer.total_training_steps={steps[-1]}", "trainer.resume_mode=auto"),
        )
        assert run.status == 0, run.tail()
        assert [step["step"] for step in run.steps] == list(steps)
        for step in run.steps:  # of an adapter that moves: an update is larger than what rounding explains
            assert step["rollout/weights_gap"] < 1e-5
            assert step["actor/grad_norm"] > 0
