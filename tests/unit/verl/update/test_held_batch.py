"""A batch that the trainer holds: what its workers are sent is what they would have fetched."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import torch
import transfer_queue
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import BatchData
from verl.utils import transferqueue_utils
from verl_world import Queue, nested, short_rows

from goldilocks.verl.store.rows_at_hand import RowsAtHand
from goldilocks.verl.update.held_batch import HeldBatch

KEYS = [f"g{i}_0_0" for i in range(6)]
ADVANTAGES = nested([torch.full((1 + i,), i / 2) for i in range(6)])
NOT_SENT = ("weight", "log_probs")
INFO = {"temperature": 0.5, "dataloader_kwargs": {"shuffle": False}, "seeds": NonTensorData([1, 2])}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue(monkeypatch)
    for i, key in enumerate(KEYS):
        queue.add(key, version=0, length=1 + i, rollout_log_probs=-0.5 * i)
        queue.rows[key] |= {"num_turns": 2, "uid": f"g{i}", "weight": torch.tensor(float(i))}
        queue.rows[key]["log_probs"] = torch.zeros(9)  # of whole sequences
    return queue


def held(queue: Queue, at_hand: bool = False) -> HeldBatch:
    """Hold all rows: fetched, or as two workers would have reported them."""
    found = HeldBatch.of(reported(queue), KEYS) if at_hand else HeldBatch.fetch(list(queue.rows))
    assert found is not None
    found.put(TensorDict({"advantages": ADVANTAGES}, batch_size=len(KEYS)))
    return found


def reported(queue: Queue) -> RowsAtHand:
    """The rows that have no tensors but of tokens, as they came with the reports of two workers."""
    rows = RowsAtHand()
    for keys in (KEYS[1::2], KEYS[::2]):
        own = [{name: queue.rows[key][name] for name in queue.rows[key] if name not in NOT_SENT} for key in keys]
        rows.add(short_rows(keys, own))
    return rows


def sent(rows: HeldBatch, keys: list[str], ranks: int) -> list[TensorDict]:
    """What each rank has when it is called with these rows."""
    part = rows.part(KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id="train", extra_info=dict(INFO)))
    assert len(part) == len(keys)
    assert BatchData(part).is_chunkable()
    return [pickle.loads(pickle.dumps(one)) for one in BatchData(part).chunk(chunks=ranks)]


def plain(rows: TensorDict) -> dict[str, Any]:
    tensors = {name: rows[name] for name in rows.keys() if isinstance(rows.get(name), torch.Tensor)}  # noqa: SIM118
    of_rows = {name: [row.tolist() for row in value.unbind()] for name, value in tensors.items()}
    return of_rows | {name: rows[name] for name in rows.keys() - tensors.keys()}


@pytest.mark.parametrize("at_hand", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("keys", [KEYS, [KEYS[4], KEYS[1]]])
def test_a_rank_is_sent_what_it_would_have_fetched(ranks: int, keys: list[str], at_hand: bool, queue: Queue) -> None:
    if at_hand:
        for row in queue.rows.values():
            del row["weight"]
    messages = sent(held(queue, at_hand), keys, ranks)
    queue.kv_batch_put(KEYS, "train", {"advantages": ADVANTAGES})
    size = len(keys) // ranks
    for rank, message in enumerate(messages):
        expected = fetched_by_a_worker(queue, keys[rank * size : (rank + 1) * size])
        assert plain(message) == plain(expected)
        assert message.batch_size == expected.batch_size
        for name, value in expected.items():
            assert type(message.get(name)) is type(expected.get(name))
            if isinstance(value, torch.Tensor):
                assert message[name].dtype == value.dtype
                assert message[name].is_nested == value.is_nested


def fetched_by_a_worker(queue: Queue, keys: list[str]) -> TensorDict:
    """verl's own way from the description of rows to rows."""
    fields = ["response_mask", "rm_scores", "rollout_log_probs", "advantages", "weight"]
    meta = transfer_queue.get_client().kv_retrieve_meta(keys, "train")
    meta = meta.select_fields([name for name in fields if name in meta.field_schema])
    meta.extra_info = dict(INFO)
    client = queue.client

    async def async_get_data(metadata: Any) -> TensorDict:
        return client.get_data(metadata)

    client.async_get_data = async_get_data  # type: ignore[attr-defined]
    return asyncio.run(transferqueue_utils._async_meta_to_realdata(meta))


def test_a_worker_is_called_with_its_rows_and_asks_no_queue(queue: Queue) -> None:
    called = transferqueue_utils.tqbridge()(lambda rows: rows)
    (message,) = sent(held(queue), KEYS, 1)
    queue.rows.clear()
    assert called(message) is message


def test_what_is_read_of_it_is_fetched_once_and_texts_only_when_asked_for(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, asked = held(queue), []
    get = queue.client.get_data
    monkeypatch.setattr(queue.client, "get_data", lambda meta: (asked.append(meta.field_names), get(meta))[1])
    found = rows.get(["advantages", "response_mask", "values"])
    assert found.keys() == {"advantages", "response_mask"}
    assert asked == []
    found = rows.get(["num_turns", "advantages", "uid"])
    assert found.pop("num_turns").tolist() == [2] * 6
    assert found.pop("uid").tolist() == [f"g{i}" for i in range(6)]
    assert asked == [["num_turns", "uid"]]


def test_nothing_is_held_of_another_storage_of_wide_rows_or_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch, columns=False)
    queue.add("g0_0_0", version=0, length=2)
    assert HeldBatch.fetch(["g0_0_0"]) is None
    queue = Queue(monkeypatch)
    queue.add("g0_0_0", version=0, length=2)
    assert HeldBatch.fetch(["g0_0_0", "g1_0_0"]) is None
    assert HeldBatch.fetch(["g0_0_0"]) is not None
    queue.rows["g0_0_0"]["position_ids"] = torch.zeros(3, 2)
    assert HeldBatch.fetch(["g0_0_0"]) is None


def test_rows_at_hand_have_the_texts_of_the_queue_and_are_held_only_together(queue: Queue) -> None:
    rows = reported(queue)
    found = held(queue, at_hand=True).get(["num_turns", "uid", "response_mask", "values"])
    expected = HeldBatch.fetch(KEYS).get(["num_turns", "uid", "response_mask"])  # type: ignore[union-attr]
    assert found.keys() == expected.keys()
    assert {name: found.get(name).tolist() for name in ("num_turns", "uid")} == {
        name: expected.get(name).tolist() for name in ("num_turns", "uid")
    }
    assert HeldBatch.of(rows, [*KEYS, "g9_0_0"]) is None
    rows.add(short_rows(["g9_0_0"], [{"response_mask": torch.ones(2)}]))
    assert HeldBatch.of(rows, ["g9_0_0"]) is not None
    assert HeldBatch.of(rows, [*KEYS, "g9_0_0"]) is None, "their fields differ"
