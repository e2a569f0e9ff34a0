"""Checks before a worker of Ray's is started. Every error is one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from goldilocks.config.settings import reward_calls
from goldilocks.errors import require
from goldilocks.runs.costs import Budget

FILES = ("train_files", "val_files")
OURS = ("goldilocks", "goldilocks_async")  # trainer.v1.trainer_mode
_HUB_NAME = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


def check_paths(config: DictConfig) -> None:
    """Check that the model, the data and the reward function exist."""
    model = str(config.actor_rollout_ref.model.path)
    known = Path(model).expanduser().is_dir() or _HUB_NAME.fullmatch(model) is not None
    require(known, "actor_rollout_ref.model.path", model, "a folder that exists, or a name on the hub (org/name)")
    for key in FILES:
        for file in files_of(config.data[key]):
            there = "://" in file or Path(file).expanduser().is_file()
            made = "a file that exists; goldilocks data make TASK --out DIR makes such files"
            require(there, f"data.{key}", file, made)
    for key, path in _reward_files(config):
        there = not path or "://" in path or Path(path).is_file()
        require(there, key, path, "a file that exists")


def _reward_files(config: DictConfig) -> Iterator[tuple[str, str | None]]:
    yield "reward.custom_reward_function.path", config.reward.custom_reward_function.path
    for name, one in reward_calls(config).weighted.items():
        yield f"goldilocks.rewards.functions.{name}.path", one.path


def budget_of(config: DictConfig) -> Budget:
    """Return the budget of the config; verl's own config has none."""
    return Budget(**((config.get("goldilocks") or {}).get("budget") or {}))


def check_budget(config: DictConfig) -> None:
    """Check the budget, and that the chosen trainer supports one."""
    budget = budget_of(config)
    mode = config.trainer.v1.trainer_mode if config.trainer.use_v1 else "V0"
    if budget.costs and mode not in OURS:
        costs = ", ".join(f"goldilocks.budget.{cost}={amount}" for cost, amount in budget.costs.items())
        raise ValueError(f"{costs} needs trainer.use_v1=True and trainer.v1.trainer_mode=goldilocks, not {mode}")


def uses_collector(config: DictConfig) -> bool:
    """Return whether a trainer of ours runs on verl's V1."""
    return bool(config.trainer.use_v1 and config.trainer.v1.trainer_mode in OURS)


def check_settings(config: DictConfig) -> None:
    """Check the settings as the trainer would."""
    from goldilocks.config.settings import Settings
    from goldilocks.verl.checks import check_v1
    from goldilocks.verl.estimators import estimator_for  # imports torch

    if uses_collector(config):
        estimator_for(Settings.from_config(config))
        check_v1(config)


def check_prompts(config: DictConfig) -> None:
    """Check that no prompt exceeds ``data.max_prompt_length``, unless verl was told to drop or truncate those."""
    data = config.data
    if data.get("filter_overlong_prompts") or data.get("truncation", "error") != "error":
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(config.actor_rollout_ref.model.path).expanduser().as_posix())
    for file in (file for key in FILES for file in files_of(data[key])):
        lengths = [prompt_length(tokenizer, prompt) for prompt in _prompts(file, data.get("prompt_key", "prompt"))]
        longer = sum(length > data.max_prompt_length for length in lengths)
        longest = f"{max(lengths, default=0)}, the tokens of the longest prompt; {longer} of {len(lengths)} prompts of"
        accepted = f"{longest} {file!r} are longer (data.filter_overlong_prompts=True drops them)"
        require(not longer, "data.max_prompt_length", data.max_prompt_length, accepted)


def files_of(value: Any) -> list[str]:
    """Return the files of a key that takes one or several."""
    return [str(file) for file in value] if isinstance(value, ListConfig | list | tuple) else [str(value)]


def _prompts(file: str, key: str) -> Iterable[Any]:
    import pyarrow.parquet as pq

    if not file.endswith(".parquet") or "://" in file:
        return []
    path = Path(file).expanduser()
    columns = pq.read_schema(path).names
    require(key in columns, "data.prompt_key", key, f"a column of {file!r}: {', '.join(columns)}")
    return pq.read_table(path, columns=[key])[key].to_pylist()


def prompt_length(tokenizer: Any, prompt: Any) -> int:
    """Return the tokens of a prompt, a text or a conversation, as the policy reads it."""
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt))
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
