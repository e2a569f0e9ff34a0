from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.utils import serial_utils
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from goldilocks.verl import plugin
from goldilocks.verl.patches.speed import FEWEST, LONGEST, PUT

plugin.additions()

DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.bool)
REQUESTS = (ZMQRequestType.PUT_DATA, ZMQRequestType.GET_DATA_RESPONSE)


def message(rows: list[Any], request: ZMQRequestType = ZMQRequestType.GET_DATA_RESPONSE) -> ZMQMessage:
    body = {"data": {"rows": rows, "texts": ["a", "b"]}, "global_indexes": [1, 2]}
    return ZMQMessage.create(request_type=request, sender_id="sender", body=body)


def read(frames: list[Any]) -> list[Any]:
    body = ZMQMessage.deserialize(frames).body
    assert body["data"]["texts"] == ["a", "b"]
    assert body["global_indexes"] == [1, 2]
    return list(body["data"]["rows"])


@st.composite
def rows_of_any_kind(draw: st.DrawFn) -> list[torch.Tensor]:
    sizes = draw(st.lists(st.sampled_from([0, 1, 3, 17, LONGEST]), max_size=3 * FEWEST))
    kinds = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=draw(st.sampled_from([1, 1, 2]))))
    tall = draw(st.booleans())
    rows = [torch.arange(size).remainder(5).to(kinds[at % len(kinds)]) for at, size in enumerate(sizes)]
    return [row.view(1, -1) for row in rows] if tall else rows


@given(rows=rows_of_any_kind(), request=st.sampled_from(REQUESTS))
def test_what_is_read_is_what_was_sent(rows: list[torch.Tensor], request: ZMQRequestType) -> None:
    got = read(message(rows, request).serialize())
    assert len(got) == len(rows)
    for row, sent in zip(got, rows, strict=True):
        assert row.dtype == sent.dtype
        assert torch.equal(row, sent)


@pytest.mark.parametrize("request_type", REQUESTS)
@given(sizes=st.lists(st.integers(0, 40), min_size=FEWEST, max_size=3 * FEWEST), dtype=st.sampled_from(DTYPES))
def test_rows_that_were_packed_into_one_part_are_read_as_they_were(
    request_type: ZMQRequestType, sizes: list[int], dtype: torch.dtype
) -> None:
    rows = [torch.arange(place, place + size).remainder(5).to(dtype) for place, size in enumerate(sizes)]
    parts = message(rows, request_type).serialize()
    assert len(parts) == 1
    for row, sent in zip(read(parts), rows, strict=True):
        assert row.dtype == sent.dtype
        assert torch.equal(row, sent)


def test_short_rows_are_one_part_and_long_or_few_ones_have_their_own() -> None:
    short, long = [torch.arange(9)] * FEWEST, [torch.zeros(LONGEST, dtype=torch.int64)] * FEWEST
    assert len(message(short).serialize()) == 1
    assert len(message(short[1:]).serialize()) == FEWEST
    assert len(message(long).serialize()) == 1 + FEWEST


def test_rows_of_every_other_kind_are_the_transfer_queues() -> None:
    rows = [None, *[torch.arange(3)] * FEWEST]
    assert len(message(rows).serialize()) == 1 + FEWEST
    assert read(message(rows).serialize())[0] is None
    assert serial_utils.decode(serial_utils.encode(list(range(20)))) == list(range(20))


@pytest.mark.parametrize("request_type", REQUESTS)
def test_rows_that_a_storage_unit_keeps_can_be_freed_one_by_one(request_type: ZMQRequestType) -> None:
    rows = read(message([torch.arange(9)] * FEWEST, request_type).serialize())
    alone = rows[0].untyped_storage().nbytes() == rows[0].nbytes
    assert alone == (request_type is ZMQRequestType.PUT_DATA)
    assert ZMQRequestType.PUT_DATA.value == PUT
    rows[0][0] = 7  # writable, as what the TransferQueue gives


def test_a_message_is_not_changed_by_being_sent() -> None:
    sent = message([torch.arange(9)] * FEWEST)
    sent.serialize()
    assert isinstance(sent.body["data"]["rows"], list)
    assert inspect.unwrap(serial_utils.MsgpackEncoder.encode) is not serial_utils.MsgpackEncoder.encode
