"""A request is ended inside the engine of verl's servers, on the engine's loop, also if the engine hears of it late.

SGLang is not installed here: a stand-in has the parts of the ``TokenizerManager`` of 0.5.12, which verl 0.9.1 names.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from goldilocks.engine.verl_server import messages
from goldilocks.engine.verl_server.messages import abort_in_sglang


class TokenizerManager:
    """The parts of SGLang's that an abort uses; an id that is not known is ignored, as there."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.event_loop = loop
        self.rid_to_state: dict[str, Any] = {}
        self.ended: list[tuple[str, threading.Thread]] = []

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        if rid in self.rid_to_state:
            self.ended.append((rid, threading.current_thread()))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PAUSE_S", 0.0)


async def test_sglang_ends_a_request_on_its_own_loop_and_one_without_a_request_has_nothing_to_end() -> None:
    manager, idle = TokenizerManager(asyncio.get_running_loop()), TokenizerManager(None)
    manager.rid_to_state = {"a": None, "b": None}
    for one in (manager, idle):
        await asyncio.to_thread(abort_in_sglang, SimpleNamespace(tokenizer_manager=one), ["a"])
    await asyncio.sleep(0.01)
    assert manager.ended == [("a", threading.current_thread())]
    assert idle.ended == []


async def test_an_abort_waits_for_a_request_that_sglang_does_not_know_yet() -> None:
    manager = TokenizerManager(asyncio.get_running_loop())
    abort_in_sglang(SimpleNamespace(tokenizer_manager=manager), ["late"])
    await asyncio.sleep(0)
    assert manager.ended == []
    manager.rid_to_state["late"] = None
    for _ in range(messages.TRIES):
        await asyncio.sleep(0)
    assert [rid for rid, _ in manager.ended] == ["late"]
