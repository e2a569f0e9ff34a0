"""A recipe on TRL (``goldilocks train RECIPE trainer=trl``): verl's config said in TRL's words, on one machine.

What TRL has no word for is an error that names the key. The folder is that of any other run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from goldilocks.errors import require
from goldilocks.launch.recipe import TRAINER
from goldilocks.runs.trl_checkpoints import last_whole

LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
LEVELS = {"vanilla": "token", "gspo": "sequence"}
VALIDATED_AT_ONCE = 64  # prompts in the slots of our engine, or in TRL's own generation
VALIDATED_IN_A_PASS = 1024  # prompts, with our engine: no loss is computed, so a row is small
ENGINE = "transformers"  # rollout.name; any other name leaves generation to TRL
SECTIONS = ("adaptive_rollout", "goldilocks", "batch_filter")


def chosen(config: DictConfig) -> bool:
    """Whether the recipe runs on TRL."""
    return config.trainer.get(TRAINER) == "trl"


def train(config: DictConfig, run_dir: Path) -> None:
    """Train to the end, from the last whole checkpoint where there is one."""
    from trl import GRPOConfig

    from goldilocks.trl import GoldilocksGRPOTrainer

    sections: dict[str, Any] = {name: OmegaConf.to_container(config[name]) for name in SECTIONS if name in config}
    sections["filter_groups"] = OmegaConf.to_container(config.algorithm.filter_groups)
    trainer = GoldilocksGRPOTrainer(
        model=str(Path(config.actor_rollout_ref.model.path).expanduser()),
        args=GRPOConfig(**arguments(config)),
        reward_funcs=[rewarded(config, name) for name in ("score", "acc")],
        train_dataset=prompts(config.data.train_files),
        eval_dataset=prompts(config.data.val_files),
        gen_batch_size=config.data.get("gen_batch_size"),
        engine_slots=slots(config),
        only_signal=True,
        eval_loss=False,  # an arm is judged by its rewards
        run_dir=run_dir,
        **sections,
    )
    folder = Path(config.trainer.default_local_dir)
    found = None if config.trainer.resume_mode == "disable" else last_whole(folder)
    trainer.train(resume_from_checkpoint=None if found is None else str(found))
    if config.trainer.save_freq > 0:
        trainer.save_model(str(folder / "model"))


def slots(config: DictConfig) -> int | None:
    """How many rollouts Goldilocks' engine decodes at a time, where it is the one that generates.

    A small batch needs few slots, but a validation is decoded in the same ones. Idle slots cost memory alone.
    """
    rollout, prompts = config.actor_rollout_ref.rollout, config.data.gen_batch_size or config.data.train_batch_size
    wanted = max(prompts * rollout.n, VALIDATED_AT_ONCE * rollout.val_kwargs.n)
    return min(rollout.max_num_seqs, wanted) if rollout.name == ENGINE else None


def arguments(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of ``GRPOConfig`` that say what verl's config says."""
    check(config)
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    prompts_at_once, n = config.data.train_batch_size, rollout.n
    mini_batches = prompts_at_once // actor.ppo_mini_batch_size
    rows = actor.ppo_mini_batch_size * n
    micro = min(actor.ppo_micro_batch_size_per_gpu or rows, rows)
    accumulated = rows // micro
    updates = mini_batches * actor.ppo_epochs  # of one batch: what verl calls a step
    validates = trainer.test_freq > 0
    validated = VALIDATED_AT_ONCE if slots(config) is None else VALIDATED_IN_A_PASS
    return {
        "output_dir": str(trainer.default_local_dir),
        "num_generations": n,
        "num_generations_eval": rollout.val_kwargs.n,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": mini_batches * accumulated,
        "num_iterations": actor.ppo_epochs,
        "per_device_eval_batch_size": validated * rollout.val_kwargs.n,
        "max_completion_length": config.data.max_response_length,
        "temperature": rollout.temperature,
        "top_p": float(rollout.top_p),
        "top_k": max(rollout.top_k, 0),
        "learning_rate": actor.optim.lr,
        "weight_decay": actor.optim.weight_decay,
        "adam_beta1": actor.optim.betas[0],
        "adam_beta2": actor.optim.betas[1],
        "lr_scheduler_type": "constant",
        "max_grad_norm": actor.grad_clip,
        "epsilon": actor.clip_ratio_low,
        "epsilon_high": actor.clip_ratio_high,
        "loss_type": LOSSES[actor.loss_agg_mode],
        "importance_sampling_level": LEVELS[actor.policy_loss.loss_mode],
        "beta": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        "scale_rewards": "group" if config.algorithm.norm_adv_by_std_in_grpo else "none",
        "reward_weights": [1.0, 0.0],  # acc is there to be judged by, not to be trained on
        "max_steps": trainer.total_training_steps * updates if trainer.total_training_steps else -1,
        "num_train_epochs": trainer.total_epochs,
        "eval_strategy": "steps" if validates else "no",
        "eval_steps": max(trainer.test_freq, 1) * updates,
        "eval_on_start": bool(trainer.val_before_train and validates),
        "save_strategy": "steps" if trainer.save_freq > 0 else "no",
        "save_steps": max(trainer.save_freq, 1) * updates,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it would wait for the loss of every micro-batch
        "dataloader_pin_memory": False,  # rows are text
        "seed": 1 if config.data.get("seed") is None else config.data.seed,
        "use_cpu": trainer.device == "cpu",
        "bf16": rollout.dtype == "bfloat16",
        "gradient_checkpointing": bool(config.actor_rollout_ref.model.enable_gradient_checkpointing),
    }


def check(config: DictConfig) -> None:
    """Refuse what TRL cannot do, by its key."""
    actor = config.actor_rollout_ref.actor
    prompts_at_once, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    for key, value, accepted in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ("grpo",)),
        ("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode, tuple(LOSSES)),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", actor.policy_loss.loss_mode, tuple(LEVELS)),
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward, (False,)),
        ("trainer.nnodes", config.trainer.nnodes, (1,)),
        ("trainer.n_gpus_per_node", config.trainer.n_gpus_per_node, (1,)),
    ):
        require(value in accepted, key, value, f"{' or '.join(map(str, accepted))} with trainer=trl")
    divides = prompts_at_once % mini == 0
    require(divides, "actor_rollout_ref.actor.ppo_mini_batch_size", mini, f"a divisor of {prompts_at_once}")


def prompts(files: Any) -> Any:
    """Return verl's parquet files as TRL's data: the prompt, and what the reward function reads."""
    from datasets import concatenate_datasets, load_dataset

    names = [files] if isinstance(files, str) else list(files)
    return concatenate_datasets(
        [load_dataset("parquet", data_files=str(Path(name).expanduser()), split="train") for name in names]
    )


def rewarded(config: DictConfig, value: str) -> Callable[..., list[float]]:
    """Return verl's reward function as one of TRL's, for one of the values it returns."""
    section = config.reward.custom_reward_function
    inner = (section.get("reward_kwargs") or {}).get("guarded_function", section)  # a guard for verl's reward workers
    score = _load(inner.path, inner.name)
    extra = dict(inner.get("reward_kwargs") or {})

    def reward(
        completions: Sequence[Any], reward_model: Sequence[Any], data_source: Sequence[str], **columns: Any
    ) -> list[float]:
        infos = columns.get("extra_info") or [None] * len(completions)
        found = []
        for answer, source, truth, info in zip(completions, data_source, reward_model, infos, strict=True):
            text = answer if isinstance(answer, str) else answer[-1]["content"]
            graded = score(source, text, truth["ground_truth"], info, **extra)
            found.append(float(graded[value]) if isinstance(graded, Mapping) else float(graded))
        return found

    reward.__name__ = value
    return reward


def _load(path: str, name: str) -> Callable[..., Any]:
    """Import the function from ``pkg://module`` or from a file, as verl does."""
    if path.startswith("pkg://"):
        return getattr(importlib.import_module(path.removeprefix("pkg://")), name)
    spec = importlib.util.spec_from_file_location("goldilocks_custom_reward", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
