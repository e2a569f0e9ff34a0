"""verl's training data as a source of prompts: keys, messages, and the order of the data loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from goldilocks.core.source import TablePrompts
from goldilocks.hashing import MEDIA


class DatasetSource(TablePrompts):
    """The prompts of verl's data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.table = getattr(dataset, "dataframe", None)
        super().__init__(len(dataset))

    def messages(self) -> Iterable[Any]:
        """The chat messages of each prompt, without building training rows if the data set allows it."""
        key = getattr(self.dataset, "prompt_key", None)
        if self.table is not None and key is not None:
            messages: Iterable[Any] = self.table[key]
            return messages
        return (self.dataset[index]["raw_prompt"] for index in range(len(self.dataset)))

    def media(self) -> Sequence[str]:
        if getattr(self.dataset, "prompt_key", None) is None:
            return ()  # the messages are whole
        names = (getattr(self.dataset, key, None) for key in MEDIA)
        return [str(name) for name in names if name in getattr(self.table, "column_names", ())]


def loader_order(sampler: Any) -> Callable[[int], np.ndarray]:
    """Return a function from the epoch to the order in which a data loader with this sampler visits the data.

    The order of any epoch must be known without going through the epochs before it: only samplers that depend on
    nothing but their seed are accepted.
    """
    from torchdata.stateful_dataloader.sampler import RandomSampler

    size = len(sampler)
    if isinstance(sampler, SequentialSampler):
        return lambda epoch: np.arange(size)
    if not (type(sampler) is RandomSampler and not sampler.replacement and size == len(sampler.data_source)):
        raise ValueError(
            f"train_sampler={type(sampler).__name__} is not accepted: a SequentialSampler, or torchdata's "
            "RandomSampler over all data. To choose prompts, write a selector (goldilocks.selector)"
        )
    state = sampler.generator.get_state()

    def order(epoch: int) -> np.ndarray:
        generator = torch.Generator()
        generator.set_state(state)
        for _ in range(epoch):
            torch.randperm(size, generator=generator)
        return torch.randperm(size, generator=generator).numpy()

    return order
