"""A batch that verl's training loop holds before its prompts and their numbers of rollouts are known.

``fit`` draws a batch of prompts, asks for ``rollout.n`` rollouts of each, and joins the two. Here the loader hands out
a placeholder, ``_get_gen_batch`` turns it into a ``Pending``, and generation fills it. So everything is
generated, and timed, where ``fit`` generates. To ``fit`` each rollout is a prompt of its own with ``rollout.n=1``.

verl's rollout manager, which fills the batch of a step with the driver.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from goldilocks.drive.driver import Driver
from goldilocks.verl.compat.backend import GenerationBatches
from goldilocks.verl.compat.rows import ProtoRows

MARK = "__pending__"


class Pending(DataProto):
    """A placeholder for rows that are not generated yet."""

    def __init__(self, placeholder: DataProto) -> None:
        super().__init__()
        self.placeholder = placeholder

    def __len__(self) -> int:
        """Return a number that no batch exceeds: ``fit`` truncates the generated batch to it."""
        return sys.maxsize

    def repeat(self, repeat_times: int = 1, interleave: bool = True) -> Pending:
        """Return the placeholder unchanged: the number of rollouts is decided during generation."""
        return self

    def fill(self, rows: DataProto) -> DataProto:
        """Put these rows into the batch that ``fit`` holds; return what ``fit`` joins to it."""
        self.placeholder.batch = TensorDict({"dummy_tensor": torch.zeros(len(rows), 1, dtype=torch.uint8)}, len(rows))
        self.placeholder.non_tensor_batch = {"uid": rows.non_tensor_batch["uid"]}
        return rows


def placeholder() -> dict[str, Any]:
    """Return an empty batch as a data loader yields it."""
    return {"dummy_tensor": torch.zeros(1, 1, dtype=torch.uint8), MARK: np.array([True], dtype=object)}


def is_placeholder(batch: DataProto) -> bool:
    """Return whether the batch is a placeholder and not a batch of validation prompts."""
    return MARK in batch.non_tensor_batch


class CollectingManager:
    """Fills a ``Pending`` batch and passes any other on to verl's manager."""

    def __init__(self, manager: Any, driver: Driver, backend: GenerationBatches, rows: ProtoRows) -> None:
        self._manager = manager
        self._driver = driver
        self._backend = backend
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def generate_sequences(self, batch: DataProto) -> DataProto:
        """Return the batch that the driver fills, or what verl generates."""
        if not isinstance(batch, Pending):
            return self._manager.generate_sequences(batch)
        self._backend.begin_batch(batch.meta_info)
        rows = self._rows.of_batch(self._driver.batch(), self._driver.collector.step)
        rows.meta_info = self._backend.about(rows)
        return batch.fill(rows)
