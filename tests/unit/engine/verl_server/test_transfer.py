from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.engine.cpu.verl_platform import PlatformCPU
from goldilocks.engine.verl_server import replica
from goldilocks.engine.verl_server.replica import Bucket, Named, buckets


async def _stream(named: list[Named]) -> AsyncIterator[Named]:
    for item in named:
        yield item


def _packed(named: list[Named], limit: int) -> list[Bucket]:
    async def collect() -> list[Bucket]:
        return [bucket async for bucket in buckets(_stream(named), limit)]

    return asyncio.run(collect())


@given(
    sizes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=12),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]), min_size=12, max_size=12
    ),
    limit=st.integers(1, 400),
)
@settings(max_examples=60)
def test_weights_arrive_as_they_were_in_buckets_no_larger_than_allowed(
    sizes: list[list[int]], dtypes: list[torch.dtype], limit: int
) -> None:
    named = [(f"w{i}", (torch.rand(size) * 9).to(dtypes[i])) for i, size in enumerate(sizes)]
    arrived: list[Named] = []
    for bucket in _packed(named, limit):
        held = list(pickle.loads(pickle.dumps(bucket)).tensors())
        assert len(held) == 1 or sum(tensor.nbytes for _, tensor in held) <= limit
        arrived += held
    assert [name for name, _ in arrived] == [name for name, _ in named]
    for (_, ours), (_, theirs) in zip(arrived, named, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


async def test_a_buffer_that_is_used_again_does_not_change_what_was_sent() -> None:
    buffer = torch.zeros(3)

    async def reused() -> AsyncIterator[Named]:
        for value in (1.0, 2.0):
            yield f"w{value}", buffer.fill_(value)

    arrived = [tensor.tolist() async for bucket in buckets(reused(), 1 << 20) for _, tensor in bucket.tensors()]
    assert arrived == [[1.0] * 3, [2.0] * 3]


def test_a_receiver_whose_sender_never_comes_gives_up(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "PEER_TIMEOUT_S", 0.05)
    monkeypatch.setattr("verl.plugin.platform.platform_manager._current_platform", PlatformCPU())
    with pytest.raises(zmq.Again):
        replica.receive_by_ipc(f"ipc://{short_path}/nobody.sock", torch.device("cpu"), lambda named, last: None)


def test_a_sender_raises_what_the_receiver_raised_instead_of_waiting(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(_reference: Any) -> None:
        raise RuntimeError("shape of q_proj differs")

    monkeypatch.setattr("verl.plugin.platform.platform_manager._current_platform", PlatformCPU())
    monkeypatch.setattr(replica, "POLL_MS", 1)
    for name, value in {"reduce_tensor": id, "get_device_id": lambda: 0}.items():  # a GPU has both
        monkeypatch.setattr(replica._verl_transfer(), name, value)
    monkeypatch.setattr(ray, "wait", lambda references, timeout: (references, []))
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(RuntimeError, match="q_proj"):
        asyncio.run(replica.send_by_ipc(f"ipc://{short_path}/nobody.sock", 1, iter([]), object()))


def test_no_two_transfers_on_a_machine_share_a_socket() -> None:
    """Two runs, each with a Ray of its own, have the same job id and the same replica ranks."""
    assert len({replica.new_handle() for _ in range(100)}) == 100
