"""verl's V1 sampler, looking for finished rollouts twenty times a second; verl looks every 2 s and has no setting."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_INTERVAL = 0.05  # seconds


class QuickSampler(ReplayBuffer):
    """For ``trainer.v1.sampler.custom_sampler``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(poll_interval=POLL_INTERVAL, **arguments)
