"""Many turns in one message to a server: what is refused fails alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from verl_world import ABORTED, VERSION, Server, VllmServer, one_server, start

from goldilocks.verl.dispatch.client import Cancelled, Reply, StreamingClient, TurnRequest
from goldilocks.verl.dispatch.failures import reason

SERVERS = {"transformers": Server, "vllm": VllmServer}


async def outcomes(client: StreamingClient, *params: dict[str, Any]) -> list[Any]:
    """Ask for a turn with each of these parameters, in one message; return their outcomes in this order."""
    replies: list[Reply] = []
    turns = [TurnRequest(client.begin("x", index), [1], own) for index, own in enumerate(params)]
    await client.ask(turns, replies.extend)
    return [reply.outcome for turn in turns for reply in replies if reply.turn is turn]


@pytest.mark.parametrize("name", SERVERS)
async def test_messages_beyond_what_a_server_takes_at_once_wait_and_may_be_cancelled_unsent(name: str) -> None:
    replies: list[Reply] = []
    server = SERVERS[name]()
    client = one_server(server, name=name, max_num_seqs=8, workers=164)  # 984 places over 164 workers
    groups = [[TurnRequest(client.begin(f"x{uid}", index), [1], {}) for index in range(2)] for uid in range(10)]
    messages = [asyncio.create_task(client.ask(turns, replies.extend)) for turns in groups]
    await server.holds(12)
    client.cancel(*(f"x{uid}" for uid in range(10)))
    await asyncio.gather(*messages)
    assert await client.drained(60) == 0
    assert len(server.prompts) == 12  # six messages of two
    assert [type(reply.outcome) for reply in replies].count(Cancelled) == 8


async def test_turns_of_single_turn_rollouts_ask_vllm_for_the_same_as_other_requests() -> None:
    replies: list[Reply] = []
    server = VllmServer()
    client = one_server(server, name="vllm", gates=True)
    turns = [TurnRequest(client.begin("x", index), [1], {"logprobs": True}) for index in range(3)]
    asked = asyncio.create_task(client.ask(turns, replies.extend))
    await server.holds(3)
    client.cancel("x")
    await asked
    assert server.messages == [3]
    assert (client.aborts.asked, client.aborts.ended) == (3, 3)
    other = start(client, "y", 0)
    await server.holds(1)
    server.answer_all()
    await other
    *turns, other = server.params
    assert turns == [other] * 3
    assert [reply.outcome.extra_fields["global_steps"] for reply in replies] == [VERSION] * 3
    assert [len(reply.outcome.extra_fields["top_log_probs"]) for reply in replies] == [len(ABORTED)] * 3


async def test_a_request_that_vllm_refuses_fails_alone_with_its_traceback() -> None:
    class Unsendable(ValueError):
        def __init__(self, name: str, reason: str) -> None:
            super().__init__(f"{name}: {reason}")

    class Refusing(VllmServer):
        async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
            if len(self.prompts) == 1:
                self.prompts.append(prompt_ids)
                raise Unsendable("the prompt", "too long")
            return await super().generate(prompt_ids, sampling_params, request_id)

    server = Refusing()
    asked = asyncio.create_task(outcomes(one_server(server, name="vllm"), {}, {}, {}))
    await server.holds(2)
    server.answer_all()
    first, refused, last = await asked
    assert first.token_ids == last.token_ids == [1, 2, 3]
    assert type(refused) is RuntimeError  # what cannot be pickled is named
    assert str(refused) == "Unsendable: the prompt: too long"
    assert "in generate" in str(refused.__cause__)  # which every Python prints; notes are printed since 3.11


async def test_the_place_of_a_failure_in_vllm_is_the_servers() -> None:
    class Refusing(VllmServer):
        async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
            raise ValueError("too long")

    (outcome,) = await outcomes(one_server(Refusing(), name="vllm"), {})
    line = Refusing.generate.__code__.co_firstlineno + 1
    assert reason(outcome) == f"ValueError: too long ({__file__}:{line})"


async def test_a_request_that_is_cancelled_inside_vllm_fails_and_is_not_waited_for() -> None:
    class Cancelling(VllmServer):
        async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
            raise asyncio.CancelledError

    client = one_server(Cancelling(), name="vllm")
    found = await outcomes(client, {}, {})
    assert await client.drained(60) == 0
    assert [str(error) for error in found] == ["the server cancelled the request: CancelledError()"] * 2


async def test_a_vllm_server_that_dies_fails_all_that_wait_for_it() -> None:
    class Dying(VllmServer):
        async def more_answers(self, batch: str) -> Any:
            answers = await super().more_answers(batch)
            if len(self.held) < 2:
                raise ConnectionError("the actor died")
            return answers

    server = Dying()
    client = one_server(server, name="vllm")
    asked = asyncio.create_task(outcomes(client, {}, {}, {}))
    names = await server.holds(3)
    server.answer(names[0], [1])
    while len(client._at_servers) == 3:
        await asyncio.sleep(0)
    server.answer(names[1], [1])
    found = await asked
    assert await client.drained(60) == 0
    first, *others = found
    assert first.token_ids == [1]
    assert [type(other) for other in others] == [ConnectionError] * 2
