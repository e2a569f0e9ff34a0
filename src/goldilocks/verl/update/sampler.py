"""verl's replay buffer, which hands out what the driver takes: a batch is a list of keys."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from goldilocks.drive.driver import Driver
from goldilocks.verl.dispatch.backend import AgentLoops
from goldilocks.verl.store.rows import PARTITION, batch_of

POLL_INTERVAL = 0.05  # seconds; validation waits on verl's own replay buffer


class DriverSampler(ReplayBuffer):
    """verl's replay buffer for validation; for training, whatever the driver takes."""

    driver: Driver
    backend: AgentLoops

    def __init__(self, config: Any) -> None:
        sampler = config.trainer.v1.sampler
        super().__init__(
            trainer_mode="sync",
            trainer_config=OmegaConf.create(),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            poll_interval=POLL_INTERVAL,
        )

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        if partition_id != PARTITION:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        self.backend.global_steps = global_steps
        groups = self.driver.take()
        return batch_of(groups), {**self.backend.manager.metrics(), **self.driver.watch.read()}
