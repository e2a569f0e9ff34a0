"""Example 1 of the guide to RayPPOTrainerWithSampling, on a toy task, and what happens when the data run dry."""

from __future__ import annotations

import os
from pathlib import Path

from setup import checkpoints, dataset, dump, model, resource_pool_manager, role_worker_mapping, tokenizer
from verl.trainer.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgoConfig,
    DataConfig,
    FilterGroupsConfig,
    PPOTrainerConfig,
    RolloutConfig,
    TrainerConfig,
)
from verl.trainer.ppo import RayPPOTrainerWithSampling

hopeless = Path(dump) / "hopeless"


def reward_fn(data_source, solution_str, ground_truth, extra_info):
    acc = float(solution_str.strip() == ground_truth) if not hopeless.exists() else 0.0
    return {"score": acc, "acc": acc}


train_dataset = dataset("data.train_files")

# Configure with dynamic sampling
config = TrainerConfig(
    algorithm=AlgoConfig(
        adv_estimator="grpo",
        use_kl_in_reward=False,
        norm_adv_by_std_in_grpo=True,
        filter_groups=FilterGroupsConfig(
            enable=True,
            metric="acc",  # Filter based on accuracy variance
            max_num_gen_batches=10,
        ),
    ),
    data=DataConfig(
        gen_batch_size=16,
        train_batch_size=2,  # far fewer than the prompts with signal among 16: there is surplus for another batch
        max_prompt_length=16,
        max_response_length=8,
    ),
    actor_rollout_ref=ActorRolloutRefConfig(
        model={"path": model},
        rollout=RolloutConfig(
            n=5  # Sample 5 responses per prompt
        ),
        actor=ActorConfig(use_kl_loss=True, kl_loss_coef=0.001, ppo_mini_batch_size=2),
    ),
    trainer=PPOTrainerConfig(
        critic_warmup=0,  # GRPO doesn't use critic
        total_training_steps=5,
        default_local_dir=checkpoints,
        save_freq=5,
        resume_mode="auto",
        logger=["console", "file"],
        more={"rollout_data_dir": dump},
    ),
)

# Create trainer
trainer = RayPPOTrainerWithSampling(
    config=config,
    tokenizer=tokenizer,
    role_worker_mapping=role_worker_mapping,
    resource_pool_manager=resource_pool_manager,
    reward_fn=reward_fn,
    train_dataset=train_dataset,
)

# Train
trainer.fit()

# It goes on from its checkpoint, and from here on no answer is right: it trains what it carried, and then ends.
hopeless.touch()
os.environ["VERL_FILE_LOGGER_PATH"] = str(Path(dump) / "metrics.jsonl")
trainer.total_training_steps = 10
trainer.fit()
