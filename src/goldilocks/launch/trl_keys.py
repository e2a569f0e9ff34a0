"""Which of verl's keys a run on TRL reads. Every other key has verl's default, or is refused.

Invariant, held by a test: a key whose value differs from verl's default is translated (``READ``), accepted with some
values only (``ACCEPTED``), about verl's processes alone (``NO_PART``), or an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from goldilocks.errors import require

WITH = "with trainer=trl"
LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
LEVELS = {"vanilla": "token", "gspo": "sequence"}
SCHEDULES = ("constant", "cosine")
NOISE = "actor_rollout_ref.rollout.seed"  # TRL has one seed, data.seed; this one may say the same

# Translated by ``on_trl``. A name that ends with a dot stands for every key below it.
READ = (
    "actor_rollout_ref.actor.clip_ratio_c",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.optim.betas",
    "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
    "actor_rollout_ref.actor.optim.min_lr_ratio",
    "actor_rollout_ref.actor.optim.num_cycles",
    "actor_rollout_ref.actor.optim.weight_decay",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_k",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "adaptive_rollout.",
    "algorithm.filter_groups.",
    "algorithm.norm_adv_by_std_in_grpo",
    "batch_filter.",
    "data.filter_overlong_prompts",
    "data.gen_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.prompt_key",
    "data.seed",
    "data.shuffle",
    "data.train_batch_size",
    "data.train_files",
    "data.train_max_samples",
    "data.val_files",
    "data.val_max_samples",
    "goldilocks.",
    "reasoning_gym.",
    "reward.custom_reward_function.",
    "task_columns",
    "trainer.backend",
    "trainer.default_local_dir",
    "trainer.device",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.resume_from_path",
    "trainer.resume_mode",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.val_before_train",
)

# Translated for these values only.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "actor_rollout_ref.actor.loss_agg_mode": tuple(LOSSES),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": SCHEDULES,
    "actor_rollout_ref.actor.policy_loss.loss_mode": tuple(LEVELS),
    "actor_rollout_ref.model.override_config.attn_implementation": ("sdpa",),
    "actor_rollout_ref.rollout.dtype": ("bfloat16", "float32"),
    "actor_rollout_ref.rollout.name": ("transformers", "hf"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": (1, 2),  # one device has one part; verl's default is 2
    "algorithm.adv_estimator": ("grpo",),
    "algorithm.filter_groups.on_full": ("finish", "requeue"),
    "algorithm.use_kl_in_reward": (False,),
    "goldilocks.features.kind": ("text",),
    "goldilocks.loss_agg": (None,),  # loss_agg_mode alone decides it
    "trainer.n_gpus_per_node": (1,),
    "trainer.nnodes": (1,),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.v1.trainer_mode": ("goldilocks", "sync"),
}

# Where and how verl's own processes compute: a run of one process learns the same whatever they say.
NO_PART = (
    "actor_rollout_ref.actor.calculate_entropy",
    "actor_rollout_ref.actor.data_loader_seed",  # of a shuffle that is refused
    "actor_rollout_ref.actor.entropy_checkpointing",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.checkpoint_engine.",
    "actor_rollout_ref.rollout.enable_sleep_mode",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.engine_kwargs.transformers.free_cache_engine",
    "actor_rollout_ref.rollout.free_cache_engine",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.log_prob_",
    "critic.",
    "data.dataloader_num_workers",
    "data.filter_overlong_prompts_workers",
    "data.val_batch_size",
    "ray_kwargs.",
    "reward.num_workers",
    "trainer.balance_batch",
    "trainer.experiment_name",
    "trainer.logger",
    "trainer.project_name",
    "trainer.rollout_data_dir",
    "transfer_queue.",
)


def check(config: DictConfig, defaults: Mapping[str, Any]) -> None:
    """Refuse every key that differs from verl's ``defaults`` (its ``leaves``) and that a run on TRL does not read.

    Both are as Hydra composed them: a key that follows another one is compared as it is written.
    """
    logs = list(config.trainer.logger)
    require(set(logs) <= {"console", "file"}, "trainer.logger", logs, f"console and file {WITH}")
    for key, value in leaves(config):
        default = defaults.get(key)
        accepted = repr(default) if key in defaults else "TRL does not know this key, so not"
        same = value == default or (key == NOISE and value == config.data.seed)
        require(same or key in ACCEPTED or _listed(key), key, value, f"{accepted} {WITH}")


def check_choices(config: DictConfig) -> None:
    """Refuse values that TRL has no word for."""
    for key, accepted in ACCEPTED.items():
        value = OmegaConf.select(config, key, default=accepted[0])
        require(value in accepted, key, value, f"{' or '.join(map(str, accepted))} {WITH}")


def leaves(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield every key that holds a value, and the value as it is written."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    yield from _leaves(plain, "")


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _listed(key: str) -> bool:
    exact, families = {*READ, *NO_PART}, tuple(name for name in (*READ, *NO_PART) if name.endswith((".", "_")))
    return key in exact or key.startswith(families)
