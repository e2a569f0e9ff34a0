"""A batch that verl's training loop holds before it is known which prompts are in it, and how many rollouts each has.

``fit`` draws a batch of prompts, asks for ``rollout.n`` rollouts of each, and joins the two. Here the loader hands out
a placeholder, ``_get_gen_batch`` turns it into a ``Pending``, and generation fills it: so everything that is generated
is generated, and timed, where ``fit`` generates. To ``fit`` each rollout is a prompt of its own with ``rollout.n=1``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

MARK = "__pending__"


class Pending(DataProto):
    """Stands for as many rows as will come."""

    def __init__(self, placeholder: DataProto) -> None:
        super().__init__()
        self.placeholder = placeholder

    def __len__(self) -> int:
        """``fit`` cuts what comes to this many rows."""
        return sys.maxsize

    def repeat(self, repeat_times: int = 1, interleave: bool = True) -> Pending:
        """How many rollouts a prompt has is decided where they are generated."""
        return self

    def fill(self, rows: DataProto) -> DataProto:
        """Make the batch that ``fit`` holds one of these rows; returns what it joins to it."""
        self.placeholder.batch = TensorDict({"dummy_tensor": torch.zeros(len(rows), 1, dtype=torch.uint8)}, len(rows))
        self.placeholder.non_tensor_batch = {"uid": rows.non_tensor_batch["uid"]}
        return rows


def placeholder() -> dict[str, Any]:
    """A batch as a data loader yields it, with nothing in it."""
    return {"dummy_tensor": torch.zeros(1, 1, dtype=torch.uint8), MARK: np.array([True], dtype=object)}


def is_placeholder(batch: DataProto) -> bool:
    """Whether the batch is one of ours, and not a batch of validation prompts."""
    return MARK in batch.non_tensor_batch
