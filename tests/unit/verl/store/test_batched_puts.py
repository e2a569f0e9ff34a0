"""Rows that arrive during a put go with the next one; each sender hears of its own rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.verl.store.batched_puts import BatchedPuts, KeyedRow


class Store:
    """Keeps the keys of each put; a put takes a turn of the event loop."""

    def __init__(self) -> None:
        self.puts: list[tuple[str, list[str]]] = []

    async def put(self, partition: str, rows: list[KeyedRow]) -> None:
        await asyncio.sleep(0)
        if any(key == "bad" for key, _, _ in rows):
            raise ValueError("disk full")
        self.puts.append((partition, [key for key, _, _ in rows]))


def row(key: str, *fields: str) -> KeyedRow:
    return key, dict.fromkeys(fields or ("prompts",), 0), {"status": "success"}


def run(work: Callable[[BatchedPuts], Awaitable[object]]) -> Store:
    store = Store()

    async def main() -> None:
        await work(BatchedPuts(store.put))

    asyncio.run(main())
    return store


def test_rows_that_come_together_are_put_together() -> None:
    async def work(puts: BatchedPuts) -> None:
        await asyncio.gather(*(puts.send("train", [row(str(i))]) for i in range(5)))

    assert run(work).puts == [("train", ["0", "1", "2", "3", "4"])]


def test_a_row_that_comes_alone_does_not_wait() -> None:
    async def work(puts: BatchedPuts) -> None:
        await puts.send("train", [row("a")])
        await puts.send("train", [row("b")])

    assert run(work).puts == [("train", ["a"]), ("train", ["b"])]


def test_what_comes_during_a_put_goes_with_the_next() -> None:
    async def late(puts: BatchedPuts, key: str) -> None:
        await asyncio.sleep(0)
        await puts.send("train", [row(key)])

    async def work(puts: BatchedPuts) -> None:
        await asyncio.gather(puts.send("train", [row("first")]), late(puts, "b"), late(puts, "c"))

    assert run(work).puts == [("train", ["first"]), ("train", ["b", "c"])]


def test_rows_of_other_partitions_or_fields_are_put_apart() -> None:
    async def work(puts: BatchedPuts) -> None:
        rows = [("train", row("a")), ("val", row("b")), ("train", row("c", "prompts", "teacher")), ("train", row("d"))]
        await asyncio.gather(*(puts.send(partition, [one]) for partition, one in rows))

    assert run(work).puts == [("train", ["a", "d"]), ("val", ["b"]), ("train", ["c"])]


def test_a_put_that_fails_is_heard_by_those_whose_rows_it_had_and_the_next_goes_on() -> None:
    async def work(puts: BatchedPuts) -> None:
        failed = await asyncio.gather(
            puts.send("train", [row("bad")]), puts.send("val", [row("good")]), return_exceptions=True
        )
        assert isinstance(failed[0], ValueError)
        assert failed[1] is None
        with pytest.raises(ValueError, match="disk full"):
            await puts.send("train", [row("bad")])
        await puts.send("train", [row("after")])

    assert run(work).puts == [("val", ["good"]), ("train", ["after"])]


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=12))
def test_every_row_is_put_once(arrivals: list[list[int]]) -> None:
    async def one(puts: BatchedPuts, number: int, waits: list[int]) -> None:
        for turn, wait in enumerate(waits):
            for _ in range(wait):
                await asyncio.sleep(0)
            await puts.send("train", [row(f"{number}.{turn}")])

    async def work(puts: BatchedPuts) -> None:
        await asyncio.gather(*(one(puts, number, waits) for number, waits in enumerate(arrivals)))

    stored = [key for _, keys in run(work).puts for key in keys]
    assert sorted(stored) == sorted(f"{i}.{j}" for i, waits in enumerate(arrivals) for j in range(len(waits)))
