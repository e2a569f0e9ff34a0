"""What sending the rows of a batch costs: by the TransferQueue's own messages, and with short rows packed.

    python benchmarks/rows.py [--rows 512] [--fields 8]

Both sides are measured in one run, in turns, and the best of each is reported; that they give the same is checked.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import zmq
from transfer_queue.utils.serial_utils import MsgpackEncoder
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from goldilocks.verl import plugin

ROUNDS = 7
Function = Callable[[], Any]


def best(ours: Function, theirs: Function) -> tuple[float, float]:
    """Milliseconds of each."""
    times: dict[Function, list[float]] = {ours: [], theirs: []}
    for _ in range(ROUNDS):
        for work in (theirs, ours):
            begin = time.perf_counter()
            work()
            times[work].append(time.perf_counter() - begin)
    return 1e3 * min(times[ours]), 1e3 * min(times[theirs])


class Wire:
    """Two sockets, as between a worker and a storage unit."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._near, self._far = self._context.socket(zmq.DEALER), self._context.socket(zmq.DEALER)
        port = self._near.bind_to_random_port("tcp://127.0.0.1")
        self._far.connect(f"tcp://127.0.0.1:{port}")

    def carry(self, parts: list[Any]) -> list[Any]:
        """What arrives."""
        self._near.send_multipart(parts, copy=False)
        return list(self._far.recv_multipart(copy=False))

    def close(self) -> None:
        self._context.destroy(linger=0)


def moved(rows: dict[str, list[torch.Tensor]], encode: Callable[..., Any], wire: Wire) -> dict[str, list[torch.Tensor]]:
    """The rows after a message with them has been written, sent and read."""
    message = ZMQMessage.create(ZMQRequestType.GET_DATA_RESPONSE, "storage", {"data": rows})  # type: ignore[arg-type]
    original, MsgpackEncoder.encode = MsgpackEncoder.encode, encode  # type: ignore[method-assign]
    try:
        parts = message.serialize()
    finally:
        MsgpackEncoder.encode = original  # type: ignore[method-assign]
    data: dict[str, list[torch.Tensor]] = ZMQMessage.deserialize(wire.carry(parts)).body["data"]
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--fields", type=int, default=8)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    plugin.additions()

    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 24, (chosen.rows,), generator=draw).tolist()
    rows = {f"field {at}": [torch.randint(0, 99, (n,), generator=draw) for n in lengths] for at in range(chosen.fields)}
    wire = Wire()
    encoders = MsgpackEncoder.encode, inspect.unwrap(MsgpackEncoder.encode)
    ours, theirs = (moved(rows, encode, wire) for encode in encoders)
    assert all(torch.equal(*pair) for field in rows for pair in zip(ours[field], theirs[field], strict=True))
    table = [("a message, there and read", *best(*(lambda e=e: moved(rows, e, wire) for e in encoders)))]
    wire.close()

    tokens = sum(lengths) // chosen.rows
    print(f"{chosen.rows} rows of {chosen.fields} fields, {tokens} tokens each; milliseconds, best of {ROUNDS}\n")
    print(f"{'':28}{'before':>10}{'goldilocks':>12}{'ratio':>9}")
    for what, mine, other in table:
        print(f"{what:28}{other:10.1f}{mine:12.2f}{other / mine:8,.0f}×")


if __name__ == "__main__":
    main()
