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


def _keys(text: str) -> frozenset[str]:
    """Return the keys of lines ``section: key key …``; one that ends in a dot or an underscore stands for a family."""
    lines = (line.partition(":") for line in text.strip().splitlines())
    return frozenset(f"{section.strip()}.{key}".lstrip(".") for section, _, keys in lines for key in keys.split())


# Translated by ``on_trl``.
READ = _keys("""
    : adaptive_rollout. batch_filter. goldilocks. reasoning_gym. task_columns
    actor_rollout_ref.actor: clip_ratio_c clip_ratio_high clip_ratio_low entropy_coeff kl_loss_coef use_kl_loss
    actor_rollout_ref.actor: ppo_epochs ppo_micro_batch_size_per_gpu ppo_mini_batch_size
    actor_rollout_ref.actor.optim: betas clip_grad lr lr_warmup_steps lr_warmup_steps_ratio
    actor_rollout_ref.actor.optim: min_lr_ratio num_cycles weight_decay
    actor_rollout_ref.model: enable_gradient_checkpointing exclude_modules lora_alpha lora_rank path target_modules
    actor_rollout_ref.rollout: max_num_seqs n temperature top_k top_p val_kwargs.n
    algorithm: filter_groups. norm_adv_by_std_in_grpo
    data: filter_overlong_prompts gen_batch_size max_prompt_length max_response_length prompt_key seed shuffle
    data: train_batch_size train_files train_max_samples val_files val_max_samples
    reward: custom_reward_function.
    trainer: backend default_local_dir device max_actor_ckpt_to_keep resume_from_path resume_mode
    trainer: save_freq test_freq total_epochs total_training_steps val_before_train
""")

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

# Where and how verl's own processes compute: a run of one process learns the same whatever they say. The seed of the
# data loader is that of a shuffle which is refused.
NO_PART = _keys("""
    : critic. ray_kwargs. transfer_queue.
    actor_rollout_ref: ref. model.lora.merge model.use_remove_padding
    actor_rollout_ref.actor: calculate_entropy data_loader_seed entropy_checkpointing ppo_max_token_len_per_gpu strategy
    actor_rollout_ref.actor: use_dynamic_bsz use_torch_compile
    actor_rollout_ref.actor.fsdp_config: mixed_precision. use_torch_compile
    actor_rollout_ref.rollout: agent.num_workers checkpoint_engine. enable_sleep_mode enforce_eager free_cache_engine
    actor_rollout_ref.rollout: engine_kwargs.transformers.free_cache_engine gpu_memory_utilization log_prob_
    data: dataloader_num_workers filter_overlong_prompts_workers val_batch_size
    reward: num_workers
    trainer: balance_batch experiment_name logger project_name rollout_data_dir
""")


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
    listed = READ | NO_PART
    return key in listed or key.startswith(tuple(name for name in listed if name.endswith((".", "_"))))
