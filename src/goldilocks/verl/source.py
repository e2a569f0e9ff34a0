"""verl's training data as a source of prompts: random access, a key for each, and the data loader's own order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from goldilocks.types import Prompt, content_key


class DatasetSource:
    """Prompts by their index in verl's data set. The key is a hash of the chat messages."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._keys = np.fromiter(map(content_key, _messages(dataset)), dtype=np.uint64, count=len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt(key=int(self._keys[index]), index=index)

    def keys(self) -> np.ndarray:
        return self._keys


def _messages(dataset: Any) -> Any:
    """The prompts alone, without building a training row for each, where the data set lets us."""
    frame, key = getattr(dataset, "dataframe", None), getattr(dataset, "prompt_key", None)
    if frame is not None and key is not None:
        return frame[key]
    return (dataset[index]["raw_prompt"] for index in range(len(dataset)))


def loader_order(data_config: Any, size: int) -> Callable[[int], np.ndarray] | None:
    """The order in which verl's data loader goes through the data, by epoch; None where it is left to chance."""
    if not data_config.shuffle:
        return lambda epoch: np.arange(size)
    seed = data_config.get("seed", None)
    if seed is None:
        return None

    def order(epoch: int) -> np.ndarray:
        generator = torch.Generator()
        generator.manual_seed(seed)
        for _ in range(epoch):
            torch.randperm(size, generator=generator)
        return torch.randperm(size, generator=generator).numpy()

    return order
