"""Weights go through a mailbox: all of them, in order, to everyone."""

from __future__ import annotations

import asyncio

from goldilocks.engine.verl_server.ray_weights import Mailbox, RayWeights


async def test_letters_are_read_in_order_by_everyone_and_waited_for() -> None:
    mailbox = Mailbox()

    async def read() -> list[object]:
        letters, number = [], 0
        while (letter := await mailbox.get(number)) is not None:
            letters.append(letter[0])
            number += 1
        return letters

    readers = [asyncio.ensure_future(read()) for _ in range(2)]
    for letter in (["a"], ["b"], None):
        await asyncio.sleep(0)
        await mailbox.put(letter)
    assert await asyncio.gather(*readers) == [["a", "b"]] * 2


def test_everyone_gets_the_mailbox_that_the_first_rank_opened() -> None:
    metadata = [{"mailbox": "m"}, *({"mailbox": None} for _ in range(4))]
    assert RayWeights.build_topology(2, 3, metadata) == ({"mailbox": ["m"] * 2}, {"mailbox": ["m"] * 3})
