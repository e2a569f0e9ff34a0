"""The rows of a batch that are still in play, reduced to what decisions need.

Invariant: rows are sorted by group; groups stand in the order of their first occurrence in the batch, and the rows of a
group in the order of the batch. Behind ``valid_rows`` every reward is finite and every response has a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from goldilocks.filtering.segments import Segments, first_occurrence_codes

Uids = Sequence[object] | np.ndarray | Tensor


@dataclass(frozen=True)
class Rows:
    """Rows sorted by group."""

    index: Tensor  # where the row stands in the batch
    group: Tensor  # its group's number, by first occurrence
    reward: Tensor  # float64
    length: Tensor

    @cached_property
    def groups(self) -> Segments:
        """The groups as runs of rows."""
        return Segments.from_sorted(self.group)

    def __len__(self) -> int:
        return self.index.numel()

    def where(self, kept: Tensor) -> Rows:
        """The rows for which ``kept`` is true."""
        if bool(kept.all()):
            return self
        chosen = kept.nonzero().squeeze(1)
        return Rows(*(values.index_select(0, chosen) for values in (self.index, self.group, self.reward, self.length)))

    def where_group(self, kept: Tensor) -> Rows:
        """The rows of the groups for which ``kept`` is true."""
        return self if bool(kept.all()) else self.where(self.groups.spread(kept))


def read_rows(batch: Mapping[str, Any], uids: Uids) -> Rows:
    """Every row of a batch, grouped; a field that is missing or has the wrong shape is an error that names it."""
    reward = row_tensor(batch, "rewards", dim=1)
    if len(uids) != reward.numel():
        raise ValueError(f"uids: expected one for each of the {reward.numel()} rows of rewards, got {len(uids)}")
    length = response_lengths(batch, reward)
    group = first_occurrence_codes(uids).to(reward.device)
    rows = Rows(torch.arange(reward.numel(), device=reward.device), group, reward.to(torch.float64), length)
    if bool((group[1:] >= group[:-1]).all()):
        return rows
    group, order = torch.sort(group, stable=True)
    return Rows(order, group, rows.reward[order], length[order])


def valid_rows(rows: Rows, on_invalid: str) -> Rows:
    """The rows that can be trained: a finite reward and a response that is not empty, else an error or a drop."""
    finite, empty = rows.reward.isfinite(), rows.length < 1
    valid = finite & ~empty
    if on_invalid == "error" and not bool(valid.all()):
        worst = int(rows.index[~valid].min())
        at = int((rows.index == worst).nonzero())
        field, value, wanted = (
            ("response_lengths", int(rows.length[at]), "at least one response token")
            if bool(finite[at])
            else ("rewards", float(rows.reward[at]), "a finite number")
        )
        raise ValueError(f"{field}[{worst}]={value}: expected {wanted}; invalid_rows='drop' drops and counts such rows")
    return rows.where(valid)


def row_tensor(batch: Mapping[str, Any], name: str, dim: int, like: Tensor | None = None) -> Tensor:
    """A field of the batch that must be a tensor of ``dim`` dimensions, with the rows and the device of ``like``."""
    if name not in batch:
        raise ValueError(f"{name}: missing from the batch, which has {sorted(batch)}")
    value = batch[name]
    if not isinstance(value, Tensor) or value.dim() != dim:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: expected a tensor of {dim} dimension{'s' * (dim > 1)}, got {shape}")
    if like is not None and (len(value) != len(like) or value.device != like.device):
        raise ValueError(
            f"{name}: expected {len(like)} rows on {like.device} as the other tensors have, "
            f"got {len(value)} on {value.device}"
        )
    return value


def response_lengths(batch: Mapping[str, Any], like: Tensor) -> Tensor:
    """Tokens of each response: ``response_lengths`` if given, else counted from ``response_mask``."""
    if "response_lengths" in batch:
        return row_tensor(batch, "response_lengths", 1, like).to(torch.int64)
    if "response_mask" not in batch:
        raise ValueError(f"response_lengths: missing, and so is response_mask; the batch has {sorted(batch)}")
    return count_tokens(row_tensor(batch, "response_mask", 2, like))


def count_tokens(mask: Tensor) -> Tensor:
    """Tokens of each row of a mask."""
    counts = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
    for block in row_blocks(mask):
        counts[block] = mask[block].sum(-1, dtype=torch.int32)
    return counts


def row_blocks(tokens: Tensor) -> Iterator[slice]:
    """Slices of rows, so that what is computed of one stays small, and on the CPU in cache, whatever the batch."""
    elements = 2**20 if tokens.device.type == "cpu" else 2**22
    step = max(1, elements // max(1, tokens.shape[1]))
    return (slice(start, start + step) for start in range(0, len(tokens), step))
