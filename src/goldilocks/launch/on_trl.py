"""A recipe on TRL (``goldilocks train RECIPE trainer=trl``): verl's config translated to TRL's, on one machine.

A key that TRL has no counterpart for is an error that names it. The folder is that of any other run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from goldilocks.config.settings import REWARD_METRICS, reward_calls
from goldilocks.errors import require
from goldilocks.launch import trl_keys
from goldilocks.launch.recipe import TRAINER, verl_defaults
from goldilocks.launch.trl_data import SCORE, Grader, dataset, seed_of
from goldilocks.launch.trl_keys import LEVELS, LOSSES
from goldilocks.runs.checkpoints import last_whole

VALIDATED_AT_ONCE = 64  # prompts in the slots of our engine, or in TRL's own generation
VALIDATED_IN_A_PASS = 1024  # prompts, with our engine: no loss is computed, so a row is small
ENGINE = "transformers"  # rollout.name; any other name leaves generation to TRL
SECTIONS = ("adaptive_rollout", "goldilocks", "batch_filter")


def chosen(config: DictConfig) -> bool:
    """Return whether the recipe runs on TRL."""
    return config.trainer.get(TRAINER) == "trl"


def train(config: DictConfig, run_dir: Path) -> None:
    """Train to the end, from the last whole checkpoint where there is one."""
    from trl import GRPOConfig

    from goldilocks.trl import GoldilocksGRPOTrainer

    sections: dict[str, Any] = {
        name: OmegaConf.to_container(config[name], resolve=True) for name in SECTIONS if name in config
    }
    sections.get("goldilocks", {}).pop("rewards", None)  # the grader calls the functions
    sections["filter_groups"] = OmegaConf.to_container(config.algorithm.filter_groups, resolve=True)
    grader = Grader(config.reward.custom_reward_function)
    trainer = GoldilocksGRPOTrainer(
        model=str(Path(config.actor_rollout_ref.model.path).expanduser()),
        args=GRPOConfig(**arguments(config)),
        reward_funcs=[grader.value(name) for name in graded(config)],
        train_dataset=dataset(config, "train"),
        eval_dataset=dataset(config, "val"),
        gen_batch_size=config.data.get("gen_batch_size"),
        engine_slots=slots(config),
        peft_config=adapter(config),
        only_signal=True,
        eval_loss=False,  # an arm is judged by its rewards
        run_dir=run_dir,
        **sections,
    )
    found = _checkpoint(config)
    trainer.train(resume_from_checkpoint=None if found is None else str(found))
    if config.trainer.save_freq > 0:
        trainer.save_model(str(Path(config.trainer.default_local_dir) / "model"))


def adapter(config: DictConfig) -> Any:
    """Return PEFT's config of the adapter that verl would train; None where the whole model is trained."""
    model = config.actor_rollout_ref.model
    if model.lora_rank <= 0:
        return None
    from peft import LoraConfig

    layers: dict[str, Any] = {
        key: OmegaConf.to_container(model[key]) if OmegaConf.is_list(model[key]) else model[key]
        for key in ("target_modules", "exclude_modules")
    }
    return LoraConfig(task_type="CAUSAL_LM", r=model.lora_rank, lora_alpha=model.lora_alpha, **layers)


def check_keys(config: DictConfig) -> None:
    """Refuse what TRL cannot do and every key that it would not read; ``config`` is as Hydra composed it."""
    check(config)
    trl_keys.check(config, verl_values())


@functools.cache
def verl_values() -> Mapping[str, Any]:
    """Return the value that each key of verl's has where nobody sets it. Composed once: a study checks many configs."""
    return dict(trl_keys.leaves(verl_defaults()))


def judged_by(config: DictConfig) -> str:
    """Return the value, beside the score, that groups are judged by: the filter's metric, else ``acc``."""
    groups = config.algorithm.filter_groups
    return groups.metric if groups.enable and groups.metric not in (SCORE, *REWARD_METRICS) else "acc"


def graded(config: DictConfig) -> list[str]:
    """Return the values of an answer that TRL is shown: the score, the one to judge by, and the parts of the score."""
    return list(dict.fromkeys([SCORE, judged_by(config), *reward_calls(config).weighted]))


def slots(config: DictConfig) -> int | None:
    """Return how many rollouts our engine decodes at a time; None where TRL generates.

    A small batch needs few slots, but a validation is decoded in the same ones. Idle slots cost memory alone.
    """
    rollout, prompts = config.actor_rollout_ref.rollout, config.data.gen_batch_size or config.data.train_batch_size
    wanted = max(prompts * rollout.n, VALIDATED_AT_ONCE * rollout.val_kwargs.n)
    return min(rollout.max_num_seqs, wanted) if rollout.name == ENGINE else None


def arguments(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of ``GRPOConfig`` that mean what verl's config means."""
    check(config)
    actor, data = config.actor_rollout_ref.actor, config.data
    updates = data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs  # of a batch, verl's step
    return {
        **_rollouts(config),
        **_batches(config),
        **_loss(config),
        **_optimizer(config, updates),
        **_steps(config, updates),
        "output_dir": str(config.trainer.default_local_dir),
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it would wait for the loss of every micro-batch
        "dataloader_pin_memory": False,  # rows are text
        "shuffle_dataset": bool(data.shuffle),
        "seed": seed_of(data),
        "use_cpu": config.trainer.device == "cpu",
        "bf16": config.actor_rollout_ref.rollout.dtype == "bfloat16",
        "gradient_checkpointing": bool(config.actor_rollout_ref.model.enable_gradient_checkpointing),
    }


def _rollouts(config: DictConfig) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    return {
        "num_generations": rollout.n,
        "num_generations_eval": rollout.val_kwargs.n,
        "max_completion_length": config.data.max_response_length,
        "temperature": rollout.temperature,
        "top_p": float(rollout.top_p),
        "top_k": max(rollout.top_k, 0),
    }


def _batches(config: DictConfig) -> dict[str, Any]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    rows = actor.ppo_mini_batch_size * rollout.n
    micro = _micro_batch(rows, actor.ppo_micro_batch_size_per_gpu)
    validated = VALIDATED_AT_ONCE if slots(config) is None else VALIDATED_IN_A_PASS
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "steps_per_generation": config.data.train_batch_size // actor.ppo_mini_batch_size * (rows // micro),
        "num_iterations": actor.ppo_epochs,
        "per_device_eval_batch_size": validated * rollout.val_kwargs.n,
    }


def _loss(config: DictConfig) -> dict[str, Any]:
    actor = config.actor_rollout_ref.actor
    return {
        "epsilon": actor.clip_ratio_low,
        "epsilon_high": actor.clip_ratio_high,
        "delta": actor.clip_ratio_c if actor.policy_loss.loss_mode == "vanilla" else None,
        **_entropy_bonus(config),
        "loss_type": LOSSES[actor.loss_agg_mode],
        "importance_sampling_level": LEVELS[actor.policy_loss.loss_mode],
        "beta": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        "scale_rewards": "group" if config.algorithm.norm_adv_by_std_in_grpo else "none",
        "reward_weights": [float(name == SCORE) for name in graded(config)],  # the others are not trained on
    }


def _optimizer(config: DictConfig, updates: int) -> dict[str, Any]:
    optim = config.actor_rollout_ref.actor.optim
    return {
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "max_grad_norm": optim.clip_grad,
        **_schedule(config, updates),
    }


def _steps(config: DictConfig, updates: int) -> dict[str, Any]:
    """Return when to end, validate and save. verl counts steps, TRL updates, ``updates`` for each step."""
    trainer = config.trainer
    validates = trainer.test_freq > 0
    return {
        "max_steps": trainer.total_training_steps * updates if trainer.total_training_steps else -1,
        "num_train_epochs": trainer.total_epochs,
        "eval_strategy": "steps" if validates else "no",
        "eval_steps": max(trainer.test_freq, 1) * updates,
        "eval_on_start": bool(trainer.val_before_train and validates),
        "save_strategy": "steps" if trainer.save_freq > 0 else "no",
        "save_steps": max(trainer.save_freq, 1) * updates,
        "save_total_limit": trainer.max_actor_ckpt_to_keep,
    }


def check(config: DictConfig) -> None:
    """Refuse what TRL cannot do, by its key."""
    trl_keys.check_choices(config)
    prompts_at_once, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    divides = prompts_at_once % mini == 0
    require(divides, "actor_rollout_ref.actor.ppo_mini_batch_size", mini, f"a divisor of {prompts_at_once}")
    optim, steps = config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps
    ratio, accepted = optim.lr_warmup_steps_ratio, "0 without trainer.total_training_steps; or set lr_warmup_steps"
    counted = not ratio or optim.lr_warmup_steps > 0 or steps is not None
    require(counted, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", ratio, accepted)


def _schedule(config: DictConfig, updates: int) -> dict[str, Any]:
    """Return verl's schedule of the learning rate, in updates."""
    optim, steps = config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps
    warm = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * (steps or 0))
    if optim.lr_scheduler_type == "cosine":
        shape = {"min_lr_rate": optim.min_lr_ratio or 0.0, "num_cycles": optim.num_cycles}
        return {"lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": warm * updates, "lr_scheduler_kwargs": shape}
    return {"lr_scheduler_type": "constant_with_warmup" if warm else "constant", "warmup_steps": warm * updates}


def _entropy_bonus(config: DictConfig) -> dict[str, float]:
    """Return TRL's argument for the entropy bonus, which the oldest supported TRL does not have."""
    from trl import GRPOConfig

    weight = float(config.actor_rollout_ref.actor.entropy_coeff)
    there = not weight or "entropy_coef" in GRPOConfig.__dataclass_fields__
    require(there, "actor_rollout_ref.actor.entropy_coeff", weight, "0 with this TRL, which has no entropy bonus")
    return {"entropy_coef": weight} if weight else {}


def _micro_batch(rows: int, most: int | None) -> int:
    """Return how many rows of a mini-batch are computed at a time: at most as many as verl would, and always as many,
    so that every row counts alike and none is left out."""
    return next(size for size in range(min(most or rows, rows), 0, -1) if rows % size == 0)


def _checkpoint(config: DictConfig) -> Path | None:
    """Return the checkpoint to go on from, by ``trainer.resume_mode``."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return Path(trainer.resume_from_path)
    return None if trainer.resume_mode == "disable" else last_whole(Path(trainer.default_local_dir))
