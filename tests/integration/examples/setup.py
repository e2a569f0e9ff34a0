"""What every script that uses verl's V0 trainer class sets up first: tokenizer, workers, data."""

from __future__ import annotations

import sys
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

given = dict(word.split("=", 1) for word in sys.argv[1:])
model = given["actor_rollout_ref.model.path"]
checkpoints = given["trainer.default_local_dir"]
dump = given["+dump"]

tokenizer = hf_tokenizer(model)
role_worker_mapping = {Role.ActorRolloutRef: ray.remote(ActorRolloutRefWorker), Role.Critic: ray.remote(TrainingWorker)}
resource_pool_manager = ResourcePoolManager(
    resource_pool_spec={"global_pool": [1]}, mapping=dict.fromkeys(role_worker_mapping, "global_pool")
)


def dataset(file: str) -> Any:
    """The parquet file, as verl reads it."""
    config = OmegaConf.create({"max_prompt_length": 16, "filter_overlong_prompts": False, "cache_dir": dump})
    return RLHFDataset(given[file], tokenizer, config)
