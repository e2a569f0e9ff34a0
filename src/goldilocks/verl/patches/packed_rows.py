"""Sends short rows packed together.

The TransferQueue sends every row of every field as a message part of its own: 512 rows of 8 fields are 4,096 parts, and
nearly all of the time that they take is spent on parts and not on tokens. Here the rows of a field are one buffer and
their lengths.

A reader gets the same list of rows as without packing, since the message itself says how it is unpickled. A process
without the plug-in understands it too, and packs its own answers from then on. So the storage units, which import
nothing of verl, need no setting.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from goldilocks.verl.patch import Function, Kind, Patch

if TYPE_CHECKING:
    import torch

LONGEST = 16_384  # bytes of a row: copying a longer one costs more than a message part of its own
FEWEST = 8  # rows
PUT = "PUT"  # the request that gives rows to a storage unit


class PackedRows:
    """Rows of one field, pickled as one buffer. Rows that are ``kept`` are later freed one by one."""

    def __init__(self, rows: list[torch.Tensor], kept: bool) -> None:
        self._rows, self._kept = rows, kept

    def __reduce__(self) -> tuple[Function, tuple[Any, ...]]:
        import numpy as np
        import torch

        lengths = np.fromiter(map(len, self._rows), dtype=np.int64, count=len(self._rows))
        joined = torch.cat(self._rows)
        name = str(joined.dtype).removeprefix("torch.")
        return unpack, (bytearray(joined.view(torch.uint8).numpy()), name, lengths.tobytes(), self._kept)


def unpack(joined: bytearray, dtype: str, lengths: bytes, kept: bool) -> list[torch.Tensor]:
    """Return the rows: kept ones with memory of their own, the others as views of the buffer."""
    import numpy as np
    import torch

    PACKED_ROWS.apply()
    kind = getattr(torch, dtype)
    flat = torch.frombuffer(joined, dtype=kind) if joined else torch.empty(0, dtype=kind)
    rows = flat.split(np.frombuffer(lengths, dtype=np.int64).tolist())
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
    without="CPU +26 % (+20 to +32)",
    needless_when="the TransferQueue sends the rows of a field as one buffer with their lengths",
)
