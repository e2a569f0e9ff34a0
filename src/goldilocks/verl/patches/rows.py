"""Rows of different lengths: those of like length in one micro-batch, and short ones in one message part.

verl fills micro-batches with long rows beside short ones. Without flash-attn a micro-batch is computed as wide as its
longest row. The gradient is the sum over micro-batches either way.

The TransferQueue sends every row of every field as a message part of its own: 512 rows of 8 fields are 4,096 parts,
which take longer than their tokens. Here the short rows of a field are one buffer and their lengths. The message itself
says how it is unpickled, so a process without the plug-in understands it too, and packs its own answers from then on:
the storage units, which import nothing of verl, need no setting.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from goldilocks.verl.patch import Function, Kind, Patch

if TYPE_CHECKING:
    import torch

# What starting a micro-batch costs, in tokens: one with fewer is not worth its kernels' launches.
START_TOKENS = 4096

LONGEST = 16_384  # bytes of a row: copying a longer one costs more than a message part of its own
FEWEST = 8  # rows
PUT = "PUT"  # the request that gives rows to a storage unit


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
    without="+42 %, and 27 % more memory",
    needless_when="verl sorts rows by length where it pads them",
)


class PackedRows:
    """Rows of one field, pickled as one buffer. Rows that are ``kept`` are later freed one by one."""

    def __init__(self, rows: list[torch.Tensor], kept: bool) -> None:
        self._rows, self._kept = rows, kept

    def __reduce__(self) -> tuple[Function, tuple[Any, ...]]:
        import numpy as np
        import torch

        joined = torch.cat(self._rows)
        lengths = np.fromiter(map(len, self._rows), dtype=np.int64, count=len(self._rows))
        numbers, dtype = bytearray(joined.view(torch.uint8).numpy()), str(joined.dtype).removeprefix("torch.")
        return unpack, (numbers, dtype, lengths.tobytes(), self._kept)


def unpack(numbers: bytearray, dtype: str, lengths: bytes, kept: bool) -> list[torch.Tensor]:
    """Return the rows: kept ones with memory of their own, the others as views of the buffer."""
    import numpy as np
    import torch

    PACKED_ROWS.apply()
    kind = getattr(torch, dtype)
    joined = torch.frombuffer(numbers, dtype=kind) if numbers else torch.empty(0, dtype=kind)
    rows = joined.split(np.frombuffer(lengths, dtype=np.int64).tolist())
    return [row.clone() for row in rows] if kept else list(rows)


def packed(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its short rows packed and everything else unchanged."""
    body = message.get("body")
    if not isinstance(body, dict) or not isinstance(data := body.get("data"), dict):
        return message
    kept = message.get("request_type") == PUT
    fields = {name: PackedRows(rows, kept) if _are_short_rows(rows) else rows for name, rows in data.items()}
    return {**message, "body": {**body, "data": fields}}


def _are_short_rows(values: Any) -> bool:
    import torch

    first = values[0] if isinstance(values, list) and len(values) >= FEWEST else None
    if type(first) is not torch.Tensor:
        return False
    dtype = first.dtype
    return all(
        type(row) is torch.Tensor
        and row.dtype is dtype
        and row.dim() == 1
        and row.device.type == "cpu"
        and row.nbytes <= LONGEST
        for row in values
    )


def pack_rows(original: Function) -> Function:
    """Return the encoder of messages with short rows packed."""

    @functools.wraps(original)
    def encode(self: Any, obj: Any) -> Any:
        return original(self, packed(obj) if isinstance(obj, dict) else obj)

    return encode


PACKED_ROWS = Patch(
    name="packed-rows",
    kind=Kind.SPEED,
    module="transfer_queue.utils.serial_utils",
    replaced={"MsgpackEncoder.encode": pack_rows},
    written_for={"MsgpackEncoder.encode": "4def6c228f01b200"},
    reason="the TransferQueue sends every row of every field as a message part of its own; short rows are one buffer",
    changes="nothing: the reader gets the same rows",
    without="+5 %; beside those that went, which cost 3 %, another 6 %",
    needless_when="the TransferQueue sends the rows of a field as one buffer with their lengths",
)
