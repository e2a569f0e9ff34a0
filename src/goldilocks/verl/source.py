"""verl's training data as a source of prompts: access by index, a key for each, and the order of the data loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from goldilocks.features.data import column, conversation_text
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

    def messages(self) -> list[Any]:
        """The chat messages of each prompt."""
        return list(_messages(self.dataset))

    def texts(self) -> list[str]:
        """What the messages of each prompt say, for features of them."""
        return [conversation_text(messages) for messages in self.messages()]

    def column(self, name: str, key: str) -> list[Any]:
        """A column of the data set, or of its ``extra_info``; ``key`` is the setting that names it."""
        return column(getattr(self.dataset, "dataframe", None), name, key)


def _messages(dataset: Any) -> Any:
    """Return the prompts without building a training row for each, if the data set allows it."""
    frame, key = getattr(dataset, "dataframe", None), getattr(dataset, "prompt_key", None)
    if frame is not None and key is not None:
        return frame[key]
    return (dataset[index]["raw_prompt"] for index in range(len(dataset)))


def loader_order(sampler: Any) -> Callable[[int], np.ndarray]:
    """Return a function from the epoch to the order in which a data loader with this sampler visits the data.

    The collector goes through the data itself, so the order of any epoch must be known without going through those
    before it: that of a sampler which looks at anything but its seed is not.
    """
    from torchdata.stateful_dataloader.sampler import RandomSampler

    size = len(sampler)
    if isinstance(sampler, SequentialSampler):
        return lambda epoch: np.arange(size)
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and size == len(sampler.data_source)
    if not shuffles:
        raise ValueError(
            f"train_sampler={type(sampler).__name__} is not accepted: a SequentialSampler, or a RandomSampler of "
            "torchdata over all of the data. To choose prompts by what is known of them, write a selector "
            "(goldilocks.selector=package.module:Class)"
        )
    state = sampler.generator.get_state()

    def order(epoch: int) -> np.ndarray:
        generator = torch.Generator()
        generator.set_state(state)
        for _ in range(epoch):
            torch.randperm(size, generator=generator)
        return torch.randperm(size, generator=generator).numpy()

    return order
