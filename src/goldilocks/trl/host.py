"""TRL's batch and the arithmetic of its loss on the host: the device gets token ids, and returns log-probs.

TRL builds a batch of small tensors and reads some forty numbers of it for its log. On a GPU each of them is a round
trip, and several runs that share the GPU wait for each other's turn at every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

HOST = torch.device("cpu")


class OnHost:
    """An ``Accelerator`` whose device is the host; all else is that of ``inner``."""

    device = HOST

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def on_host(trainer: Any) -> Iterator[None]:
    """Have TRL make its tensors on the host."""
    before = trainer.accelerator
    trainer.accelerator = OnHost(before)
    try:
        yield
    finally:
        trainer.accelerator = before


def moved(values: Any, device: torch.device) -> Any:
    """Return the values with every tensor among them on ``device``; gradients flow back to where they were."""
    if isinstance(values, dict):
        return {name: moved(value, device) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(moved(value, device) for value in values)
    return values.to(device) if isinstance(values, Tensor) else values


class Unread(Dataset[dict[str, Any]]):
    """Empty rows, as many as the data set has.

    TRL's loader reads a whole batch of rows for each micro-batch, and the collector reads those that it chose.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Unsent:
    """Rows of text on their way from a loader: accelerate looks for tensors in every list and dictionary it sees."""

    rows: Any
