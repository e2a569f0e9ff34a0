"""verl's data and reward function for TRL: the rows under the column names that TRL reads, and one grading an answer.

An answer is graded within the time limit that it has under verl.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from goldilocks.launch.preflight import files_of, prompt_length
from goldilocks.rewards import RewardFailed, RewardTimeout, is_number
from goldilocks.rewards.calls import PATH, SCORE, guarded, reward_of
from goldilocks.verl.checks import check_text

logger = logging.getLogger(__name__)

PROMPT = "prompt"  # TRL's name for the column

Grades = Mapping[str, float]
RewardFunction = Callable[..., list[float | None]]


def dataset(config: DictConfig, split: str) -> Any:
    """Return the rows of ``data.train_files`` or ``data.val_files`` that verl would use, in their order."""
    data = config.data
    check_text(data, "trainer=trl and goldilocks pass-rates take text", [split])
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
            return [grades.get(name) for grades in self._graded(completions, columns)]

        reward.__name__ = name
        return reward

    def _graded(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Grades]:
        """TRL hands the same list to each of its functions; it is held here, so that no other can be taken for it."""
        if completions is not self._batch:
            self._grades = self._loop.run_until_complete(self._all(_answers(completions, columns)))
            self._batch = completions
        return self._grades

    async def _all(self, answers: Iterable[dict[str, Any]]) -> list[Grades]:
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


def _answers(completions: Sequence[Any], columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each answer as verl calls a reward function with it."""
    infos = columns.get("extra_info") or [None] * len(completions)
    rows = zip(completions, columns["data_source"], columns["reward_model"], infos, strict=True)
    for answer, source, model, info in rows:
        text = answer if isinstance(answer, str) else answer[-1]["content"]
        yield {"data_source": source, "solution_str": text, "ground_truth": model["ground_truth"], "extra_info": info}
