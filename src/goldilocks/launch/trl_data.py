"""verl's data for TRL: the same rows, under the column names that TRL reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from goldilocks.launch.preflight import files_of, prompt_length

PROMPT = "prompt"  # TRL's name for the column


def dataset(config: DictConfig, split: str) -> Any:
    """Return the rows of ``data.train_files`` or ``data.val_files`` that verl would use, in their order."""
    data = config.data
    rows = read(data[f"{split}_files"])
    if data.prompt_key != PROMPT:
        rows = rows.rename_column(data.prompt_key, PROMPT)
    return _short(_some(rows, data[f"{split}_max_samples"], data), config)


def read(files: Any) -> Any:
    """Return all rows of parquet files, one after another."""
    from datasets import concatenate_datasets, load_dataset

    paths = [str(Path(file).expanduser()) for file in files_of(files)]
    return concatenate_datasets([load_dataset("parquet", data_files=path, split="train") for path in paths])


def seed_of(data: DictConfig) -> int:
    """Return the seed of a run: one that has none is the same after each start, its draw of rows too."""
    return 1 if data.get("seed") is None else int(data.seed)


def _some(rows: Any, most: int, data: DictConfig) -> Any:
    """Choose ``most`` rows as verl does; below zero, all."""
    if not 0 < most < len(rows):
        return rows
    if not data.shuffle:
        return rows.select(range(most))
    return rows.select(np.random.default_rng(seed_of(data)).choice(len(rows), size=most, replace=False).tolist())


def _short(rows: Any, config: DictConfig) -> Any:
    """Drop prompts that are too long, if that is asked for; where it is not, one of them ends the run at its start."""
    if not config.data.filter_overlong_prompts:
        return rows
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(config.actor_rollout_ref.model.path).expanduser().as_posix())
    longest = config.data.max_prompt_length
    return rows.filter(lambda row: prompt_length(tokenizer, row[PROMPT]) <= longest)
