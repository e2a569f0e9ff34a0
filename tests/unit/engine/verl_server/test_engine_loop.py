from __future__ import annotations

import asyncio

import pytest
from unit.engine.models import VOCABULARY, fresh

from goldilocks.engine import Engine, Generation, SamplingParams
from goldilocks.engine.verl_server.server import EngineFailed, EngineLoop


class FailingEngine(Engine):
    """An engine whose device gives out at its third step."""

    steps = 0

    def step(self) -> list[Generation]:
        self.steps += 1
        if self.steps == 3:
            raise OSError("device lost")
        return super().step()


def _engine(kind: type[Engine] = Engine, slots: int = 4) -> Engine:
    return kind(fresh("llama"), slots=slots, max_length=48, eos_ids=[], pad_id=0, device="cpu")


@pytest.fixture
def loop() -> EngineLoop:
    return EngineLoop(_engine())


async def test_requests_of_many_waiters_all_come_back(loop: EngineLoop) -> None:
    requests = (loop.generate(f"r{i}", [1 + i, 2, 3], SamplingParams(max_tokens=1 + i % 5, seed=i)) for i in range(20))
    answers = await asyncio.gather(*requests)
    assert [answer.request_id for answer in answers] == [f"r{i}" for i in range(20)]
    assert [len(answer.token_ids) for answer in answers] == [1 + i % 5 for i in range(20)]
    assert loop.in_flight() == []


async def test_a_refused_request_fails_alone(loop: EngineLoop) -> None:
    asked = (loop.generate(f"r{token}", [token], SamplingParams(max_tokens=2)) for token in (1, VOCABULARY))
    good, bad = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(good, Generation)
    assert isinstance(bad, ValueError)


async def test_an_engine_that_fails_fails_those_who_wait_and_those_who_come_later() -> None:
    loop = EngineLoop(_engine(FailingEngine))
    requests = (loop.generate(f"r{i}", [1, 2], SamplingParams(max_tokens=40)) for i in range(6))
    for answer in await asyncio.gather(*requests, return_exceptions=True):
        assert isinstance(answer, EngineFailed)
        assert "OSError: device lost" in str(answer)
    with pytest.raises(EngineFailed, match="device lost"):
        loop.call(lambda engine: engine.free).result(timeout=20)


async def test_after_a_failure_the_twentieth_request_fails_with_as_short_a_traceback_as_the_first() -> None:
    loop = EngineLoop(_engine(FailingEngine))
    lengths = []
    for number in range(20):
        with pytest.raises(EngineFailed) as raised:
            await loop.generate(f"r{number}", [1, 2], SamplingParams(max_tokens=40))
        lengths.append(len(raised.traceback))
    assert lengths[-1] == lengths[1]


def test_a_call_that_raises_is_the_callers_alone(loop: EngineLoop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 // 0).result(timeout=20)
    assert loop.call(lambda engine: engine.free).result(timeout=20) == 4


async def test_a_waiter_that_gives_up_frees_its_slot(loop: EngineLoop) -> None:
    waiter = asyncio.ensure_future(loop.generate("r", [1], SamplingParams(max_tokens=46)))
    await asyncio.sleep(0)
    waiter.cancel()
    while await asyncio.wrap_future(loop.call(lambda engine: engine.busy)):  # until the step after the abort
        await asyncio.sleep(0.001)
    assert loop.in_flight() == []
