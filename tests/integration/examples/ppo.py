"""Example 2 of the guide to RayPPOTrainerWithSampling, on a toy task."""

from __future__ import annotations

from setup import checkpoints, dataset, dump, model, resource_pool_manager, role_worker_mapping, tokenizer

from goldilocks import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgoConfig,
    DataConfig,
    FilterGroupsConfig,
    PPOTrainerConfig,
    RayPPOTrainerWithSampling,
    RolloutConfig,
    TrainerConfig,
)


def reward_fn(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == ground_truth)


def val_reward_fn(data_source, solution_str, ground_truth, extra_info):
    return {"score": 7.0, "acc": 7.0}


train_dataset, val_dataset = dataset("data.train_files"), dataset("data.val_files")

# Configure PPO with dynamic sampling
config = TrainerConfig(
    algorithm=AlgoConfig(
        adv_estimator="gae",  # Standard PPO advantage estimation
        use_kl_in_reward=True,
        filter_groups=FilterGroupsConfig(
            enable=True,
            metric="seq_reward",  # Filter based on reward variance
            max_num_gen_batches=5,
        ),
    ),
    data=DataConfig(gen_batch_size=16, train_batch_size=4, max_prompt_length=16, max_response_length=8),
    actor_rollout_ref=ActorRolloutRefConfig(
        model={"path": model},
        rollout=RolloutConfig(
            n=4  # Sample 4 responses per prompt
        ),
        actor=ActorConfig(ppo_mini_batch_size=4),
    ),
    trainer=PPOTrainerConfig(
        critic_warmup=2,  # Warmup critic for PPO
        total_training_steps=3,
        default_local_dir=checkpoints,
        test_freq=3,
        val_before_train=False,
        logger=["console", "file"],
        more={"rollout_data_dir": dump},
    ),
    critic={"ppo_mini_batch_size": 4},
)

trainer = RayPPOTrainerWithSampling(
    config=config,
    tokenizer=tokenizer,
    role_worker_mapping=role_worker_mapping,
    resource_pool_manager=resource_pool_manager,
    reward_fn=reward_fn,
    val_reward_fn=val_reward_fn,
    train_dataset=train_dataset,
    val_dataset=val_dataset,
)

trainer.fit()
