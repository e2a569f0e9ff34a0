"""The TransferQueue reads off columns what it reads off the TensorDict that verl packs of the same rows."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transfer_queue.utils.serial_utils import decode, encode
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl_world import comparable

from goldilocks.verl.store.batched_puts import Columns, Tags

VALUES = st.one_of(st.none(), st.text(max_size=5), st.dictionaries(st.text(max_size=3), st.integers(-9, 9), max_size=2))


@st.composite
def some_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    return [
        {
            "tokens": torch.arange(length),
            "scores": torch.full((length,), 0.5),
            "fixed": torch.tensor([place, 1]),
            "text": draw(VALUES),
            "turns": [draw(st.integers(0, 3))],
        }
        for place, length in enumerate(lengths)
    ]


def stored(fields: Any, positions: list[int]) -> dict[str, list[Any]]:
    """What a storage unit is sent of these rows, and keeps of each."""
    select = AsyncSimpleStorageManager._select_by_positions
    message = decode(encode({name: select(fields[name], positions) for name in fields.keys()}))  # noqa: SIM118
    return {name: [comparable(value) for value in column] for name, column in message.items()}


@given(some_rows(), st.data())
def test_what_is_stored_and_what_is_known_of_it_is_the_same(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True).map(sorted))
    ours, verls = Columns(rows), list_of_dict_to_tensordict(rows)
    assert extract_field_schema(ours) == extract_field_schema(verls)
    assert stored(ours, positions) == stored(verls, positions)


def test_tags_are_sent_as_those_of_any_batch() -> None:
    sent = []

    async def asked(**request: Any) -> None:
        sent.append((request["request_type"], request["body"]))

    client = SimpleNamespace(client_id="client", _controller="controller", _request_controller=asked)
    for kind in (Tags, BatchMeta):
        batch = kind([4, 7], ["train"] * 2, custom_meta=[{"seq_len": 3, "versions": [[1, 2]]}, {"seq_len": 5}])
        asyncio.run(inspect.unwrap(AsyncTransferQueueClient.async_set_custom_meta)(client, batch, socket="socket"))
    assert sent[0] == sent[1]
    assert sent[0][1] == {
        "partition_custom_meta": {"train": {4: {"seq_len": 3, "versions": [[1, 2]]}, 7: {"seq_len": 5}}}
    }
