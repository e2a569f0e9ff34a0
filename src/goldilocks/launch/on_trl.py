"""A recipe on TRL (``goldilocks train RECIPE trainer=trl``): verl's config translated to TRL's, on one machine.

Invariant, held by a test: a key whose value differs from verl's default is translated (``READ``), accepted with some
values only (``ACCEPTED``), about verl's processes alone (``NO_PART``), or an error that names it. The folder is that of
any other run.

verl's data are the rows under the column names that TRL reads, and verl's reward function grades an answer within the
time limit that it has under verl.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from goldilocks.config.recipes import SECTIONS, TRAINER, verl_defaults
from goldilocks.config.sections import reward_calls
from goldilocks.config.settings import REWARD_METRICS
from goldilocks.dotted_keys import values
from goldilocks.errors import require
from goldilocks.launch.preflight import files_of, prompt_tokens
from goldilocks.rewards import RewardFailed, RewardTimeout, is_number
from goldilocks.rewards.calls import PATH, SCORE, guarded, reward_of
from goldilocks.runs.checkpoints import last_whole
from goldilocks.verl.checks import check_text

logger = logging.getLogger(__name__)

Grades = Mapping[str, float]
RewardFunction = Callable[..., list[float | None]]

PROMPT = "prompt"  # TRL's name for the column
WITH = "with trainer=trl"
LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
LEVELS = {"vanilla": "token", "gspo": "sequence"}
SCHEDULES = ("constant", "cosine")
NOISE = "actor_rollout_ref.rollout.seed"  # TRL has one seed, data.seed; this one may say the same

VALIDATED_AT_ONCE = 64  # prompts in the slots of our engine, or in TRL's own generation
VALIDATED_IN_A_PASS = 1024  # prompts, with our engine: no loss is computed, so a row is small
ENGINE = "transformers"  # rollout.name; any other name leaves generation to TRL


def _keys(text: str) -> frozenset[str]:
    """Return the keys of lines ``section: key key …``; one that ends in a dot or an underscore stands for a family."""
    lines = (line.partition(":") for line in text.strip().splitlines())
    return frozenset(f"{section.strip()}.{key}".lstrip(".") for section, _, keys in lines for key in keys.split())


# Translated by ``on_trl``.
READ = _keys("""
    : adaptive_rollout. batch_filter. goldilocks. task.
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
MAY_BE_NULL = (*NO_PART, "actor_rollout_ref.actor.optim.min_lr_ratio")  # though verl's default is a number


def check_read(config: DictConfig) -> None:
    """Refuse every key that differs from verl's default and that a run on TRL does not read.

    ``config`` is as Hydra composed it: a key that follows another one is compared as it is written.
    """
    defaults, listed = verl_values(), READ | NO_PART
    families = tuple(name for name in listed if name.endswith((".", "_")))
    logs = files_of(config.trainer.logger)
    require(set(logs) <= {"console", "file"}, "trainer.logger", logs, f"console and file {WITH}")
    for key, value in leaves(config).items():
        default = defaults.get(key)
        accepted = repr(default) if key in defaults else "TRL does not know this key, so not"
        number = type(default) not in (int, float) or type(value) in (int, float) or "${" in str(value)
        require(number or (value is None and key.startswith(MAY_BE_NULL)), key, value, f"a number {WITH}")
        same = value == default or (key == NOISE and value == config.data.seed)
        known = key in ACCEPTED or key in listed or key.startswith(families)
        require(same or known, key, value, f"{accepted} {WITH}")


def check_keys(config: DictConfig) -> None:
    """Refuse what TRL cannot do, and every key that it would not read."""
    check(config)
    check_read(config)


def leaves(config: DictConfig) -> dict[str, Any]:
    """Return every key that holds a value, and the value as it is written."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return values(plain)


def chosen(config: DictConfig) -> bool:
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


@functools.cache
def verl_values() -> Mapping[str, Any]:
    """Return the value that each key of verl's has where nobody sets it. Composed once: a study checks many configs."""
    return leaves(verl_defaults())


def graded(config: DictConfig) -> list[str]:
    """Return the values of an answer that TRL is shown: the score, the one to judge by, and the parts of the score.

    Groups are judged by the filter's metric where it is not the score itself, else by ``acc``.
    """
    groups = config.algorithm.filter_groups
    judged = groups.metric if groups.enable and groups.metric not in (SCORE, *REWARD_METRICS) else "acc"
    return list(dict.fromkeys([SCORE, judged, *(reward_calls(config).functions or ())]))


def slots(config: DictConfig) -> int | None:
    """Return how many rollouts our engine decodes at a time; None where TRL generates.

    A small batch needs few slots, but a validation is decoded in the same ones. Idle slots cost memory alone.
    """
    rollout, prompts = config.actor_rollout_ref.rollout, config.data.gen_batch_size or config.data.train_batch_size
    wanted = max(prompts * rollout.n, VALIDATED_AT_ONCE * rollout.val_kwargs.n)
    return min(rollout.max_num_seqs, wanted) if rollout.name == ENGINE else None


def arguments(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of ``GRPOConfig`` that mean what verl's config means, which ``check_keys`` has accepted."""
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    updates = data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs  # of a batch, verl's step
    return {
        "num_generations": rollout.n,
        "num_generations_eval": rollout.val_kwargs.n,
        "max_completion_length": data.max_response_length,
        "temperature": rollout.temperature,
        "top_p": float(rollout.top_p),
        "top_k": max(rollout.top_k, 0),
        **_batches(config),
        "epsilon": actor.clip_ratio_low,
        "epsilon_high": actor.clip_ratio_high,
        "delta": actor.clip_ratio_c if actor.policy_loss.loss_mode == "vanilla" else None,
        "entropy_coef": float(actor.entropy_coeff),
        "loss_type": LOSSES[actor.loss_agg_mode],
        "importance_sampling_level": LEVELS[actor.policy_loss.loss_mode],
        "beta": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        "scale_rewards": "group" if config.algorithm.norm_adv_by_std_in_grpo else "none",
        "reward_weights": [float(name == SCORE) for name in graded(config)],  # the others are not trained on
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
        "bf16": rollout.dtype == "bfloat16",
        "gradient_checkpointing": bool(config.actor_rollout_ref.model.enable_gradient_checkpointing),
    }


def _batches(config: DictConfig) -> dict[str, Any]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    rows = actor.ppo_mini_batch_size * rollout.n
    # At most as many rows at a time as verl computes, and always as many: every row counts alike, and none is left out.
    most = min(actor.ppo_micro_batch_size_per_gpu or rows, rows)
    micro = next(size for size in range(most, 0, -1) if rows % size == 0)
    validated = VALIDATED_AT_ONCE if slots(config) is None else VALIDATED_IN_A_PASS
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "steps_per_generation": config.data.train_batch_size // actor.ppo_mini_batch_size * (rows // micro),
        "num_iterations": actor.ppo_epochs,
        "per_device_eval_batch_size": validated * rollout.val_kwargs.n,
    }


def _optimizer(config: DictConfig, updates: int) -> dict[str, Any]:
    """Return verl's optimizer and its schedule of the learning rate, ``updates`` for each of verl's steps."""
    optim, steps = config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps
    warm = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * (steps or 0))
    schedule: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup" if warm else "constant"}
    if optim.lr_scheduler_type == "cosine":
        shape = {"min_lr_rate": optim.min_lr_ratio or 0.0, "num_cycles": optim.num_cycles}
        schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": shape}
    return {
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "max_grad_norm": optim.clip_grad,
        "warmup_steps": warm * updates,
        **schedule,
    }


def _steps(config: DictConfig, updates: int) -> dict[str, Any]:
    """Return when to end, validate and save. verl counts steps, TRL updates, ``updates`` for each step."""
    trainer = config.trainer
    return {
        "max_steps": trainer.total_training_steps * updates if trainer.total_training_steps else -1,
        "num_train_epochs": trainer.total_epochs,
        "eval_strategy": "steps" if trainer.test_freq > 0 else "no",
        "eval_steps": max(trainer.test_freq, 1) * updates,
        "eval_on_start": bool(trainer.val_before_train),
        "save_strategy": "steps" if trainer.save_freq > 0 else "no",
        "save_steps": max(trainer.save_freq, 1) * updates,
        "save_total_limit": trainer.max_actor_ckpt_to_keep,
    }


def check(config: DictConfig) -> None:
    """Refuse what TRL cannot do or has no word for, by its key."""
    for key, words in ACCEPTED.items():
        value = OmegaConf.select(config, key, default=words[0])
        require(value in words, key, value, f"{' or '.join(map(str, words))} {WITH}")
    prompts_at_once, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    divides = isinstance(mini, int) and mini > 0 and prompts_at_once % mini == 0
    require(divides, "actor_rollout_ref.actor.ppo_mini_batch_size", mini, f"a divisor of {prompts_at_once}")
    optim, steps = config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps
    ratio, accepted = optim.lr_warmup_steps_ratio, "0 without trainer.total_training_steps; or set lr_warmup_steps"
    counted = not ratio or optim.lr_warmup_steps > 0 or steps is not None
    require(counted, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", ratio, accepted)
    path, accepted = config.trainer.resume_from_path, "the folder of a checkpoint, with trainer.resume_mode=resume_path"
    require(bool(path) or config.trainer.resume_mode != "resume_path", "trainer.resume_from_path", path, accepted)


def _checkpoint(config: DictConfig) -> Path | None:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return Path(trainer.resume_from_path)
    return None if trainer.resume_mode == "disable" else last_whole(Path(trainer.default_local_dir))


def dataset(config: DictConfig, split: str) -> Any:
    """Return the rows of ``data.train_files`` or ``data.val_files`` that verl would use, in their order."""
    from datasets import concatenate_datasets, load_dataset

    data = config.data
    check_text(data, "trainer=trl and goldilocks pass-rates take text", [split])
    paths = [str(Path(file).expanduser()) for file in files_of(data[f"{split}_files"])]
    for path in paths:
        require(path.endswith(".parquet"), f"data.{split}_files", path, "parquet files")
    rows = concatenate_datasets([load_dataset("parquet", data_files=path, split="train") for path in paths])
    lacking = ", ".join(name for name in ("data_source", "reward_model") if name not in rows.column_names)
    require(not lacking, f"data.{split}_files", ", ".join(paths), f"files with the column {lacking}, to grade by")
    if data.prompt_key != PROMPT:
        rows = rows.rename_column(data.prompt_key, PROMPT)
    most = data[f"{split}_max_samples"]
    if 0 < most < len(rows):
        drawn = np.random.default_rng(seed_of(data)).choice(len(rows), size=most, replace=False).tolist()
        rows = rows.select(drawn if data.shuffle else range(most))
    if not data.filter_overlong_prompts:  # then one that is too long has ended the run at its start
        return rows
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(config.actor_rollout_ref.model.path).expanduser().as_posix())
    return rows.filter(lambda row: len(prompt_tokens(tokenizer, row[PROMPT], data)) <= data.max_prompt_length)


def seed_of(data: DictConfig) -> int:
    """Return the seed of a run: one that has none is the same after each start, its draw of rows too."""
    return 1 if data.get("seed") is None else int(data.seed)


class Grader:
    """Grades a batch when the first of TRL's reward functions asks; the others read what it found."""

    def __init__(self, custom: DictConfig) -> None:
        """``custom`` is ``reward.custom_reward_function``, under a time limit or not."""
        wrapped: Any = custom if custom.path == PATH else OmegaConf.create(guarded(custom))
        self._reward, calls = reward_of(wrapped.reward_kwargs.packed)
        # Where goldilocks.rewards says what a failure means, any error is one; else an error ends the run.
        self._failures: type[Exception] = Exception if calls.in_use else RewardTimeout
        self._loop = asyncio.new_event_loop()
        self._batch: Sequence[Any] = ()
        self._grades: list[Grades] = []

    def value(self, name: str) -> RewardFunction:
        """Return the reward function of TRL's for one of the values; None where an answer does not have it."""

        def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
            # TRL hands the same list to each of its functions; it is held here, so that no other can be taken for it.
            if completions is not self._batch:
                self._grades = self._loop.run_until_complete(self._all(completions, columns))
                self._batch = completions
            return [grades.get(name) for grades in self._grades]

        reward.__name__ = name
        return reward

    async def _all(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Grades]:
        """Grade each answer; verl calls a reward function so."""
        infos = columns.get("extra_info") or [None] * len(completions)
        rows = zip(completions, columns["data_source"], columns["reward_model"], infos, strict=True)
        answers = [
            {
                "data_source": source,
                "solution_str": answer if isinstance(answer, str) else answer[-1]["content"],
                "ground_truth": model["ground_truth"],
                "extra_info": info,
            }
            for answer, source, model, info in rows
        ]
        return list(await asyncio.gather(*map(self._one, answers)))

    async def _one(self, answer: dict[str, Any]) -> Grades:
        """Return the values that are numbers: a reward function may return texts beside them."""
        try:
            found = await self._reward(**answer)
        except RewardFailed:
            raise
        except self._failures as error:
            logger.warning("%s; the rollout fails", error)
            return {}
        if not isinstance(found, Mapping):
            return {SCORE: float(found), "acc": float(found)}
        numbers = {name: float(value) for name, value in found.items() if is_number(value)}
        return {name: value for name, value in numbers.items() if not math.isnan(value)}
