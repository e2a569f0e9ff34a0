"""Rows of like length in one micro-batch: without flash-attn a micro-batch is computed as wide as its longest row.

verl fills micro-batches so that each has as much work as the others, long rows beside short ones. The gradient is the
sum over micro-batches either way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from goldilocks.verl.patch import Function, Kind, Patch

# What starting a micro-batch costs, in tokens: one with fewer is not worth its kernels' launches.
START_TOKENS = 4096


def rows_by_length(original: Function) -> Function:
    """Cut the rows, sorted by length, where computing them together costs more than one more micro-batch."""

    @functools.wraps(original)
    def rearrange_micro_batches(batch: Any, max_token_len: int, dp_group: Any = None, **options: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        if not _is_padded(batch, dp_group, options):
            return original(batch, max_token_len, dp_group=dp_group, **options)
        lengths = batch["input_ids"].offsets().diff().tolist()
        if max(lengths) > max_token_len:
            return original(batch, max_token_len, dp_group=dp_group, **options)  # which says so
        parts = cut_by_length(lengths, max_token_len)
        return [tu.index_select_tensor_dict(batch, part) for part in parts], parts

    return rearrange_micro_batches


def _is_padded(batch: Any, dp_group: Any, options: dict[str, Any]) -> bool:
    """Whether rows will be padded, and one rank decides alone how many micro-batches there are."""
    import torch
    from verl.utils import tensordict_utils as tu

    if tu.get_non_tensor_data(batch, "use_remove_padding", True) or not batch["input_ids"].is_nested:
        return False
    if options.get("num_batches_divided_by") or options.get("min_num_micro_batch"):
        return False
    alone = (
        not torch.distributed.is_initialized() or dp_group is None or torch.distributed.get_world_size(dp_group) == 1
    )
    return alone and options.get("force_group_size", 1) == 1


def cut_by_length(lengths: Sequence[int], limit: int, start: int = START_TOKENS) -> list[list[int]]:
    """The rows in parts of at most ``limit`` tokens with padding, at the least tokens over all, ``start`` per part.

    The shortest path over the sorted rows: a part that ends with a row is as wide as that row.
    """
    import numpy as np

    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    places = np.arange(len(order) + 1)
    costs, cuts = np.zeros(len(order) + 1), [0]  # the cheapest way to compute the first so many rows
    for end, row in enumerate(order, start=1):
        width = max(1, lengths[row])
        first = max(0, end - limit // width)
        totals = costs[first:end] + (end - places[first:end]) * width
        begin = first + int(totals.argmin())
        costs[end] = totals[begin - first] + start
        cuts.append(begin)
    parts, end = [], len(order)
    while end:
        parts.append(sorted(order[cuts[end] : end]))
        end = cuts[end]
    return parts[::-1]


ROWS_BY_LENGTH = Patch(
    name="rows-by-length",
    kind=Kind.SPEED,
    module="verl.workers.engine.utils",
    replaced={"rearrange_micro_batches": rows_by_length},
    written_for={"rearrange_micro_batches": ("2e384e734df9f191", "0aececd7f211c358")},
    reason="verl puts long rows beside short ones; rows of like length are padded less",
    changes="the order in which gradients are summed; the token limit of a micro-batch counts its padding",
    without="CPU +1 % (-1 to +2)",
    needless_when="verl sorts rows by length where it pads them",
)
