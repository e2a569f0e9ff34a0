"""A replica of the rollout server, one Ray actor beside one training worker on its device, and the worker's side of it.

Importing this module registers ``rollout.name=transformers`` in verl's tables of replicas and of the workers' adapters.

New weights go from the worker to the server. On a GPU they go by verl's bucketed sender and receiver over CUDA IPC.
verl's wait for each other for ever: here the sender looks at the call that receives, and the receiver has a time limit,
so that a peer that failed is an error. Without a GPU they go through Ray's object store in buckets, which the server
reads without a copy.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import ray
import torch
import zmq
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_resource_name, is_support_ipc
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from goldilocks.engine.verl_server import NAME, check
from goldilocks.errors import refuse

Named = tuple[str, Tensor]

PEER_TIMEOUT_S = 600.0  # longer than any bucket takes to fill
POLL_MS = 1000


def server_name(replica_rank: int, role: str = "") -> str:
    """Return the name by which a worker finds the server of its replica."""
    return f"transformers_server{role}_{replica_rank}"


class TransformersReplica(RolloutReplica):
    """Launches the server on the node and device of its worker, and represents it to verl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check(self.config, self.model_config)

    async def launch_servers(self) -> None:
        """Start the server and wait until its engine is built."""
        from goldilocks.engine.verl_server.server import RolloutServer

        node, device = await self.workers[0].__ray_call__.remote(_place)
        role = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        server = (
            ray.remote(RolloutServer)
            .options(
                name=server_name(self.replica_rank, role) + self.name_suffix,
                # The server asks Ray for no GPU and uses its worker's, so Ray must not hide the devices.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
                max_concurrency=self.max_concurrency,
            )
            .remote(
                config=self.config,
                model_config=self.model_config,
                replica_rank=self.replica_rank,
                visible_device=None if get_device_name() == "cpu" else device,
            )
        )
        address = await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        # The load balancer identifies servers by address; ours have no port.
        self._server_address = f"{address}:{self.replica_rank}"

    async def sleep(self) -> None:
        """As verl's; a server that keeps its cache has nothing to release and is not asked."""
        if self.config.free_cache_engine:
            await super().sleep()


def _place(_worker: Any) -> tuple[str, str]:
    """Return the node and the device of the worker that this runs in."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


class TransformersAdapter(BaseRollout):
    """The training worker's side: hands the server the weights, puts it to sleep and wakes it.

    One per training rank; a replica is one rank, so each serves the server beside it.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        check(self.config, self.model_config)
        self.model_config.lora["merge"] = True  # the training engine of this worker reads the same object
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._found: Any = None

    @property
    def _server(self) -> Any:
        if self._found is None:  # it is launched after the worker
            self._found = ray.get_actor(server_name(self.replica_rank))
        return self._found

    async def resume(self, tags: list[str]) -> None:
        """Take back the memory named by ``tags``."""
        await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Give back what memory the server can."""
        await self._server.sleep.remote()

    @torch.no_grad()
    async def update_weights(  # type: ignore[override]  # as verl calls it
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **_peft: Any
    ) -> None:
        """Send every weight to the server, with the number of the policy update."""
        if wire_format != "named_tensors":
            accepted = f"named_tensors with rollout.name={NAME}, by rollout.checkpoint_engine.backend=naive or nccl"
            refuse("wire_format", wire_format, accepted)
        megabytes = self.config.checkpoint_engine.update_weights_bucket_megabytes
        if is_support_ipc():
            handle = new_handle()
            receiving: Any = self._server.load_weights_by_ipc.remote(handle)
            await send_by_ipc(handle, megabytes, weights, receiving)
            await receiving
            if global_steps is not None:
                await self._server.set_global_steps.remote(global_steps)
            return
        last: Bucket | None = None
        async for bucket in buckets(ensure_async_iterator(weights), megabytes << 20):
            if last is not None:
                await self._server.load_weights.remote(last, False)
            last = bucket
        await self._server.load_weights.remote(last, True, global_steps)  # there is no model without weights


RolloutReplicaRegistry.register(NAME, lambda: TransformersReplica)
# verl has no function for adapters, only the table.
_ROLLOUT_REGISTRY[(NAME, "async")] = "goldilocks.engine.verl_server.replica.TransformersAdapter"


# -- new weights -------------------------------------------------------------------------------------------------------


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

    class Limited(_verl_transfer().BucketedWeightReceiver):  # type: ignore[misc]
        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket.setsockopt(zmq.RCVTIMEO, int(PEER_TIMEOUT_S * 1000))

    Limited(zmq_handle=handle, device=device).receive_weights(load)


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
        while not self._socket.poll(POLL_MS, event):
            if self._receiving is not None and ray.wait([self._receiving], timeout=0)[0]:
                ray.get(self._receiving)  # raises, unless the answer is under way
                self._receiving = None


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
