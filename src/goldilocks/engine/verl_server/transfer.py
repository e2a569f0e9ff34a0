"""Transfer of new weights from a training worker to the rollout server beside it.

On a GPU they go by verl's bucketed sender and receiver over CUDA IPC. verl's wait for each other for ever: here the
sender looks at the call that receives, and the receiver has a time limit, so that a peer that failed is an error.
Without a GPU they go through Ray's object store in buckets, which the server reads without a copy.
"""

from __future__ import annotations

import functools
import importlib.util
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor

Named = tuple[str, Tensor]

PEER_TIMEOUT_S = 600.0  # longer than any bucket takes to fill
POLL_MS = 1000


class Bucket:
    """Named tensors as one array of bytes, which Ray stores once and shares without a copy."""

    def __init__(self, named: list[Named]) -> None:
        self._meta = [(name, tensor.shape, tensor.dtype, tensor.nbytes) for name, tensor in named]
        flat = [tensor.detach().contiguous().cpu().flatten().view(torch.uint8) for _, tensor in named]
        self._bytes: np.ndarray = torch.cat(flat).numpy()

    def tensors(self) -> Iterable[Named]:
        """Yield the tensors, each in memory of its own: the bytes may belong to Ray's store and be unaligned."""
        start = 0
        for name, shape, dtype, size in self._meta:
            tensor = torch.empty(shape, dtype=dtype)
            tensor.flatten().view(torch.uint8).numpy()[:] = self._bytes[start : start + size]
            yield name, tensor
            start += size


async def buckets(weights: AsyncIterator[Named], limit: int) -> AsyncIterator[Bucket]:
    """Pack ``weights`` in order into buckets of at most ``limit`` bytes; a larger tensor gets one of its own."""
    held: list[Named] = []
    size = 0
    async for name, tensor in weights:
        if held and size + tensor.nbytes > limit:
            yield Bucket(held)
            held, size = [], 0
        # A generator of weights may reuse its buffer for the next one.
        held.append((name, tensor.detach().cpu().clone()))
        size += tensor.nbytes
    if held:
        yield Bucket(held)


def new_handle() -> str:
    """Return a socket that no other transfer on this machine has.

    Ray's ids would not do: every Ray counts jobs and actors from one, and two runs may share a machine.
    """
    return f"ipc:///tmp/goldilocks-weights-{uuid.uuid4().hex}.sock"


async def send_by_ipc(handle: str, bucket_megabytes: int, weights: Any, receiving: Any) -> None:
    """Send ``weights`` to the process that called ``receive_by_ipc`` with the same ``handle``.

    ``receiving`` is the reference of that call: what it raises is raised here.
    """
    sender = sender_that_looks(_verl_transfer().BucketedWeightSender, lambda: receiving)
    await sender(zmq_handle=handle, bucket_size_mb=bucket_megabytes).async_send_weights(weights)


def receive_by_ipc(handle: str, device: torch.device, load: Callable[[list[Named], bool], None]) -> None:
    """Receive what ``send_by_ipc`` sends; give each bucket to ``load``, with whether it is the last. Blocks."""
    receiver = _with_time_limit(_verl_transfer().BucketedWeightReceiver)
    receiver(zmq_handle=handle, device=device).receive_weights(load)


def sender_that_looks(sender: Any, receiving: Callable[[], Any]) -> Any:
    """verl's sender, which waits for an answer only while the call that ``receiving`` returns goes on."""

    class Sender(sender):
        socket: Any

        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket.linger = 0  # else a process with a message for a peer that is gone could not end
            self.socket = _WatchingSocket(self.socket, receiving())

    return functools.update_wrapper(Sender, sender, updated=())


class _WatchingSocket:
    """A ZMQ socket that raises what the call of the other side raised: before that connects, and before it answers."""

    def __init__(self, socket: Any, receiving: Any) -> None:
        self._socket, self._receiving = socket, receiving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_pyobj(self, message: Any) -> None:
        self._wait_for(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> Any:
        self._wait_for(zmq.POLLIN)
        return self._socket.recv()

    def _wait_for(self, event: int) -> None:
        import ray

        while not self._socket.poll(POLL_MS, event):
            if self._receiving is not None and ray.wait([self._receiving], timeout=0)[0]:
                ray.get(self._receiving)  # raises, unless the answer is under way
                self._receiving = None


def _with_time_limit(receiver: Any) -> Any:
    """verl's receiver, whose socket waits no longer than ``PEER_TIMEOUT_S``."""

    class Limited(receiver):
        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket.setsockopt(zmq.RCVTIMEO, int(PEER_TIMEOUT_S * 1000))

    return Limited


@functools.cache
def _verl_transfer() -> ModuleType:
    """verl's bucketed transfer. Its package imports vLLM on the way in; the file by itself does not."""
    import verl

    path = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("goldilocks.engine._verl_bucketed_weight_transfer", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"verl has no {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
