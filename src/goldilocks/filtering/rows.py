"""The rows of a batch that are still in play: index, group, reward and length.

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

from goldilocks.errors import require
from goldilocks.filtering.segments import Segments, first_occurrence_codes

Uids = Sequence[object] | np.ndarray | Tensor


@dataclass(frozen=True)
class Rows:
    """Rows sorted by group."""

    index: Tensor  # of the row in the batch
    group: Tensor  # its group's number, by first occurrence
    reward: Tensor  # float64
    length: Tensor

    @cached_property
    def groups(self) -> Segments:
        return Segments.from_sorted(self.group)

    def __len__(self) -> int:
        return self.index.numel()

    def where(self, kept: Tensor) -> Rows:
        if bool(kept.all()):
            return self
        chosen = kept.nonzero().squeeze(1)
        return Rows(*(values.index_select(0, chosen) for values in (self.index, self.group, self.reward, self.length)))

    def where_group(self, kept: Tensor) -> Rows:
        return self if bool(kept.all()) else self.where(self.groups.spread(kept))


def read_rows(batch: Mapping[str, Any], uids: Uids) -> Rows:
    """Return every row of a batch, grouped. Raise ``ValueError`` for a field that is missing or has the wrong shape."""
    reward = row_tensor(batch, "rewards", dim=1)
    require_uids(uids, len(reward))
    length = response_lengths(batch, reward)
    group = first_occurrence_codes(uids).to(reward.device)
    rows = Rows(torch.arange(reward.numel(), device=reward.device), group, reward.to(torch.float64), length)
    if bool((group[1:] >= group[:-1]).all()):
        return rows
    group, order = torch.sort(group, stable=True)
    return Rows(order, group, rows.reward[order], length[order])


def valid_rows(rows: Rows, on_invalid: str) -> Rows:
    """Return the rows with a finite reward and a response; for others raise ``ValueError``, or drop them."""
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
        accepted = f"{wanted}; with batch_filter.invalid_rows=drop such rows are dropped and counted"
        raise ValueError(f"{field}[{worst}]={value} is not accepted: {accepted}")
    return rows.where(valid)


def require_uids(uids: Uids, rows: int) -> None:
    """Raise a ``ValueError`` unless there is one uid for each row."""
    require(len(uids) == rows, "uids", f"{len(uids)} uids", f"one for each of the {rows} rows")


def row_tensor(batch: Mapping[str, Any], name: str, dim: int, like: Tensor | None = None) -> Tensor:
    """Return a field that must be a tensor of ``dim`` dimensions, with the rows and the device of ``like``."""
    if name not in batch:
        raise ValueError(f"{name} is missing from the batch, which has {sorted(batch)}")
    value = batch[name]
    shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    fits = isinstance(value, Tensor) and value.dim() == dim
    require(fits, name, shape, f"a tensor of {dim} dimension{'s' * (dim > 1)}")
    if like is not None:
        same = len(value) == len(like) and value.device == like.device
        require(same, name, f"{shape} on {value.device}", f"{len(like)} rows on {like.device}, as the other tensors")
    return value  # type: ignore[no-any-return]


def response_lengths(batch: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return the tokens of each response: ``response_lengths`` if given, else counted from ``response_mask``."""
    if "response_lengths" in batch:
        return row_tensor(batch, "response_lengths", 1, like).to(torch.int64)
    if "response_mask" not in batch:
        raise ValueError(f"response_lengths and response_mask are missing from the batch, which has {sorted(batch)}")
    return count_tokens(row_tensor(batch, "response_mask", 2, like))


def count_tokens(mask: Tensor) -> Tensor:
    counts = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
    for block in row_blocks(mask):
        counts[block] = mask[block].sum(-1, dtype=torch.int32)
    return counts


def row_blocks(tokens: Tensor) -> Iterator[slice]:
    """Return slices of rows: temporaries stay small, and on the CPU in cache, whatever the batch."""
    elements = 2**20 if tokens.device.type == "cpu" else 2**22
    step = max(1, elements // max(1, tokens.shape[1]))
    return (slice(start, start + step) for start in range(0, len(tokens), step))
