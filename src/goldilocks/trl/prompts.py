"""TRL's training data as a source of prompts, in the order of TRL's own sampler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from trl.trainer.utils import RepeatSampler

from goldilocks.core.source import TablePrompts
from goldilocks.errors import require
from goldilocks.trl import images

IMAGES = ("images", "image")  # TRL reads the first of them that is there


class DatasetPrompts(TablePrompts):
    """The prompts of TRL's data set."""

    def __init__(self, dataset: Any) -> None:
        random_access = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        require(random_access, "train_dataset", type(dataset).__name__, "a data set with a length and random access")
        columns = getattr(dataset, "column_names", None) or list(dataset[0])
        require("prompt" in columns, "train_dataset", columns, "a data set with the column 'prompt'")
        self.images = next((column for column in columns if column in IMAGES), None)
        known = self.images is None or images.known_to_trl()
        require(known, "train_dataset", self.images, "no images, unless every section is left out, with this TRL")
        self._dataset = self.table = dataset
        super().__init__(len(dataset))

    def media(self) -> Sequence[str]:
        return () if self.images is None else (self.images,)

    def messages(self) -> Iterable[Any]:
        named = hasattr(self._dataset, "column_names")
        return self._dataset["prompt"] if named else (row["prompt"] for row in self._dataset)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return a row of the data set for each index; equal indices have rows of their own, since TRL writes there."""
        distinct = list(dict.fromkeys(indices))  # reading a row is dear, copying it is not
        together = getattr(self._dataset, "__getitems__", None)
        fetched = together(distinct) if together else [self._dataset[index] for index in distinct]
        row = dict(zip(distinct, fetched, strict=True))
        return [_copied(row[index]) for index in indices]


def _copied(value: Any) -> Any:
    """Return a copy of a row as data sets have them, for a tenth of what ``copy.deepcopy`` takes."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    shared = isinstance(value, str | int | float | None) or hasattr(value, "tobytes")  # nobody writes into an image
    return value if shared else copy.deepcopy(value)


class SamplerOrder:
    """The order in which TRL's sampler goes through the data, by epoch.

    TRL drops what is left of an epoch when no whole batch can be made of it; so does this.
    """

    def __init__(self, dataset: Any, *, groups: int, shuffle: bool, seed: int) -> None:
        self._make: Callable[[], Any] = lambda: RepeatSampler(
            dataset, mini_repeat_count=1, batch_size=groups, repeat_count=1, shuffle=shuffle, seed=seed
        )
        self._sampler = self._make()
        self._next_epoch = 0
        size = len(dataset)
        require(size >= groups, "train_dataset", f"{size} prompts", f"at least {groups}: one generation batch")

    def __call__(self, epoch: int) -> np.ndarray:
        """Return the indices of an epoch. One generator shuffles all epochs, so they are drawn in turn."""
        if epoch < self._next_epoch:
            self._sampler, self._next_epoch = self._make(), 0
        for _ in range(epoch - self._next_epoch):
            list(self._sampler)
        self._next_epoch = epoch + 1
        return np.array(list(self._sampler), dtype=np.int64)
