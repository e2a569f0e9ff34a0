"""Rows that fill a batch up without being trained.

Two stages: every incomplete group up to the group size, its padding right behind it; then the batch up to a multiple of
what data-parallel ranks and mini-batches divide it by, at the end.

A padding row is a real row's prompt with an empty response. Its masks, rewards and advantages are zero and its uid is
its own, so it enters no group's mean or standard deviation, and none of its tokens enters a loss. Real rows keep their
values and their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from goldilocks.errors import require
from goldilocks.filtering.batch_filter import take_rows
from goldilocks.filtering.rows import Segments, Uids, first_occurrence_codes, require_uids, row_tensor

PADDING_UID = "__padding__"

# Fields that are zero in a padding row: which tokens count, and what they count for.
ZEROED = (
    "response_mask",
    "loss_mask",
    "response_lengths",
    "rewards",
    "rm_scores",
    "token_level_scores",
    "token_level_rewards",
    "advantages",
    "returns",
)


@dataclass(frozen=True)
class PaddedBatch:
    """A batch with padding rows."""

    batch: dict[str, Any]
    uids: list[object]
    is_padding: Tensor


def pad_batch(
    batch: Mapping[str, Any], uids: Uids, group_size: int | None, divisor: int, zeroed: Sequence[str] = ZEROED
) -> PaddedBatch:
    """Fill incomplete groups up to ``group_size`` (None: leave groups as they are) and the batch up to ``divisor``.

    Groups come out in the order of first occurrence, each in one piece. Padding rows copy the row with the fewest
    response tokens, then ``zeroed`` fields are zero and the response's part of ``attention_mask`` is too.
    """
    require(divisor >= 1, "divisor", divisor, "1 or more")
    mask = row_tensor(batch, "response_mask", 2)
    require_uids(uids, len(mask))
    require(len(mask) > 0, "response_mask", "no rows", "at least one row: a padding row is made from a real one")
    source, is_padding = _plan(uids, group_size, divisor, template=int(mask.sum(-1).argmin()))
    source, is_padding = source.to(mask.device), is_padding.to(mask.device)
    padded = take_rows(batch, source, len(mask))
    for name in set(zeroed) & padded.keys():
        _zero(name, padded[name], is_padding)
    if "attention_mask" in padded:
        padded["attention_mask"][is_padding, -mask.shape[1] :] = 0
    return PaddedBatch(padded, _padded_uids(uids, source, is_padding), is_padding)


def _plan(uids: Uids, group_size: int | None, divisor: int, template: int) -> tuple[Tensor, Tensor]:
    """Return for every row of the padded batch the row it is made from, and whether it is padding."""
    group, source = torch.sort(first_occurrence_codes(uids), stable=True)
    groups = Segments.from_sorted(group)
    place = torch.arange(len(source))
    total = len(source)
    if group_size is not None:
        largest = int(groups.sizes.max())
        require(group_size >= largest, "group_size", group_size, f"{largest} or more, the size of the largest group")
        place = groups.of_row * group_size + groups.position
        total = len(groups) * group_size
    total = -(-total // divisor) * divisor
    is_padding = torch.ones(total, dtype=torch.bool).index_fill_(0, place, False)
    return torch.full((total,), template).index_copy_(0, place, source), is_padding


def _zero(name: str, values: Any, where: Tensor) -> None:
    fits = isinstance(values, (Tensor, np.ndarray))
    require(fits, name, type(values).__name__, "a tensor or a numpy array, which padding can zero")
    values[where if isinstance(values, Tensor) else where.cpu().numpy()] = 0


def _padded_uids(uids: Uids, source: Tensor, is_padding: Tensor) -> list[object]:
    """Return the uids: each padding row is a group of its own, so that it shifts no baseline."""
    values = uids.tolist() if isinstance(uids, (np.ndarray, Tensor)) else uids
    return [
        f"{PADDING_UID}{place}" if padding else values[row]
        for place, (row, padding) in enumerate(zip(source.tolist(), is_padding.tolist(), strict=True))
    ]
