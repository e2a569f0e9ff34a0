from __future__ import annotations

import pytest


@pytest.mark.integration
def test_grpo(launch):
    run = launch("trainer.total_training_steps=3", "trainer.test_freq=3")
    assert run.status == 0, run.tail()
    print(run.steps[-1])
    print(run.seconds)
