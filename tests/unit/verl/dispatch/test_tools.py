"""verl's own tool agent loop in our worker: what tools write is no answer, and no tool works for nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.workers.config import RolloutConfig
from verl_world import ABORTED, Queue, Server, Worker, prompt, written

from goldilocks.config.recipes import CONFIG
from goldilocks.engine.engine import Generation
from goldilocks.tasks.arithmetic import CALL, CLOSE, TOOL, Calculator
from goldilocks.tasks.calculator_tool import CalculatorTool
from goldilocks.tasks.tiny_model import tiny_model
from goldilocks.types import Failure, Rollout
from goldilocks.verl.dispatch.backend import ANSWERS, FIRST

pytestmark = pytest.mark.usefixtures("queue")

TOKENIZER = AutoTokenizer.from_pretrained(tiny_model("calculator"))
END = TOKENIZER.eos_token_id
CALLED = [*TOKENIZER.encode(f"{CALL}2+2{CLOSE}"), END]
SAID = TOKENIZER.encode("\n<|tool|>4\n<|assistant|>")
ANSWERED = [*TOKENIZER.encode("4"), END]
SCHEMA = OpenAIFunctionToolSchema.model_validate(
    OmegaConf.to_container(OmegaConf.load(CONFIG / "tools" / "calculator.yaml").tools[0].tool_schema)
)


class Calls(CalculatorTool):
    """The calculator, which notes what happens to it and answers when it is let."""

    def __init__(self, **config: Any) -> None:
        super().__init__({"type": "native", **config}, SCHEMA)
        self.seen: list[str] = []
        self.called, self.let = asyncio.Event(), asyncio.Event()
        self.let.set()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.seen.append("create")
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.seen.append(parameters["expression"])
        self.called.set()
        await self.let.wait()
        return await super().execute(instance_id, parameters, **kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.seen.append("release")


class ToolWorker(Worker):
    """A worker whose prompts go to verl's tool agent loop."""

    def __init__(self, server: Server, *tools: Any) -> None:
        super().__init__(server, whole=False)
        keys = {"prompt_length": 16, "response_length": 80, "max_num_seqs": 64, "name": "transformers"}
        turns = {"max_assistant_turns": 3, "format": "hermes"}
        rollout = {**keys, "full_determinism": False, "agent": {"num_workers": 1}, "multi_turn": turns}
        whole = OmegaConf.structured(RolloutConfig(**keys, calculate_log_probs=True))
        self.config.actor_rollout_ref.rollout = OmegaConf.merge(whole, rollout)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.llm_client.config = self.config
        self.tokenizer, self.hf_model_type = TOKENIZER, "qwen2"
        self.tools = list(tools)


def asked(n: int = 1, **fields: Any) -> dict[str, Any]:
    row = prompt(2, n, agent_name="tool_agent", data_source=Calculator.data_source)
    return {**row, "reward_model": {"style": "rule", "ground_truth": "4"}, **fields}


def calls_then_answers(name: str, prompt_ids: list[int], seed: int) -> Generation:
    """A model that calls the tool, and says what the tool has said."""
    return written(name, ANSWERED if TOKENIZER.convert_tokens_to_ids(TOOL) in prompt_ids else CALLED)


async def until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 60)


async def test_what_a_tool_wrote_is_masked_and_counted_apart(queue: Queue) -> None:
    tool = Calls()
    worker = ToolWorker(Server(calls_then_answers), tool)
    await worker.start([asked()])
    (rollout,) = await worker.finish()
    assert isinstance(rollout, Rollout)
    assert tool.seen == ["create", "2+2", "release"]
    assert (rollout.reward, rollout.tokens, rollout.tool_tokens) == (1.0, len(CALLED + ANSWERED), len(SAID))
    assert not rollout.truncated
    (row,) = queue.rows.values()
    assert row["responses"].tolist() == CALLED + SAID + ANSWERED
    mask = [1] * len(CALLED) + [0] * len(SAID) + [1] * len(ANSWERED)
    assert row["response_mask"].tolist() == row["loss_mask"].tolist() == mask
    assert [value != 0 for value in row["rollout_log_probs"].tolist()] == [bool(kept) for kept in mask]
    assert row["extra_fields"]["top_log_probs"] == [-0.5 if kept else 0.0 for kept in mask]  # which gate 2 reads


async def test_a_cancelled_group_ends_its_calls_and_the_tool_is_told(queue: Queue) -> None:
    tool = Calls()
    tool.let.clear()  # it never answers
    worker = ToolWorker(Server(calls_then_answers), tool)
    await worker.start([asked(3)])
    while tool.seen.count("2+2") < 3:
        await until(tool.called)
        await asyncio.sleep(0)
    await worker.cancel(["g2"])
    assert await worker.finish() == [Failure("g2", index, "cancelled", len(CALLED)) for index in range(3)]
    assert tool.seen.count("release") == 3
    assert queue.rows == {}


async def test_a_call_that_was_complete_when_its_group_was_cancelled_is_not_made() -> None:
    tool, server = Calls(), Server(aborts=False)
    worker = ToolWorker(server, tool)
    await worker.start([asked()])
    (name,) = await server.holds(1)
    await worker.cancel(["g2"])
    server.answer(name, CALLED)
    assert await worker.finish() == [Failure("g2", 0, "cancelled", len(CALLED))]
    assert tool.seen == []


@pytest.mark.parametrize("function", [False, True], ids=["with a lifecycle", "function"])
async def test_a_conversation_that_pauses_goes_on_without_a_second_call(function: bool) -> None:
    tool = Calls()
    given: Any = tool
    if function:

        async def calculator(expression: str) -> Any:
            return await tool.execute("", {"expression": expression})

        given = FunctionTool("calculator", calculator, SCHEMA, is_async=True)
    server = Server()
    worker = ToolWorker(server, given)
    await worker.start([asked()])
    tool.let.clear()
    server.answer((await server.holds(1))[0], CALLED)
    await until(tool.called)
    assert [paused.tokens for paused in await worker.pause(1.0)] == [len(CALLED)]  # in the middle of the call
    tool.let.set()
    await worker.resume()
    server.answer((await server.holds(1))[0], ANSWERED)
    (rollout,) = await worker.finish()
    assert isinstance(rollout, Rollout)
    assert tool.seen.count("2+2") == 1


async def test_only_the_first_answer_is_saved_and_a_conversation_with_more_begins_anew() -> None:
    server = Server()
    worker = ToolWorker(server, Calls())
    await worker.start([asked(2)])
    first, second = await server.holds(2)
    server.answer(first, CALLED)
    while first in server.held or len(server.held) < 2:  # until it asks for its second answer
        await asyncio.sleep(0)
    assert len(await worker.pause(1.0)) == 2
    ((_, index, saved),) = await worker.answers()
    assert [part["token_ids"].tolist() for part in saved["parts"]] == [ABORTED]

    again_server = Server()
    again = ToolWorker(again_server, Calls())
    await again.start([asked(2, **{ANSWERS: {index: saved}})])
    await again_server.holds(2)
    question = server.prompt_of[second]
    assert sorted(again_server.prompts, key=len) == [question, [*question, *ABORTED]]


class Schedule:
    """Conversations that are paused, cut by a restart and answered in any order, without a clock.

    Between two actions every session is held by its server, so that every call of the tool has its reply.
    """

    def __init__(self, sessions: int) -> None:
        self.tool, self.server = Calls(), Server()
        self.worker = ToolWorker(self.server, self.tool)
        self.left, self.restarts = sessions, 0
        self.events: list[Rollout | Failure] = []

    async def run(self, actions: list[str]) -> None:
        await self.worker.start([asked(self.left)])
        for action in (*actions, *["answer"] * 4 * self.left):
            await self.quiet()
            if self.left:
                await getattr(self, action)()
        await self.quiet()

    async def quiet(self) -> None:
        while len(self.server.held) != self.left:
            await asyncio.sleep(0.001)
            new = self.worker._new_events()
            self.events += new
            self.left -= len(new)

    async def pause(self) -> None:
        await self.worker.pause(1.0)
        await self.worker.resume()

    async def answer(self) -> None:
        name = (await self.server.holds(1))[0]
        spoken = TOKENIZER.convert_tokens_to_ids(TOOL) in self.server.prompt_of[name]
        self.server.answer(name, ANSWERED if spoken else CALLED)

    async def restart(self) -> None:
        saved = {index: answer for _, index, answer in await self.worker.answers()}
        unfinished = [session.index for session in self.worker.llm_client.unfinished]
        for task in self.worker.background_tasks:
            task.cancel()
        await asyncio.gather(*self.worker.background_tasks, return_exceptions=True)
        self.server = Server()
        self.worker = ToolWorker(self.server, self.tool)
        for index in unfinished:
            own = {index: saved[index]} if index in saved else {}
            await self.worker.start([asked(**{FIRST: index, ANSWERS: own})])
        self.restarts += 1


@settings(max_examples=4)
@example(2, ["pause", "answer", "pause", "restart", "answer", "restart", "pause", "answer"])
@given(st.integers(1, 3), st.lists(st.sampled_from(["pause", "answer", "restart"]), max_size=8))
def test_however_conversations_pause_and_restart_each_ends_once_and_releases_what_it_called(
    sessions: int, actions: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Queue(monkeypatch)

        async def main() -> Schedule:
            schedule = Schedule(sessions)
            await asyncio.wait_for(schedule.run(actions), 600)
            return schedule

        schedule = asyncio.run(main())
    assert sorted(event.index for event in schedule.events) == list(range(sessions))
    assert all(isinstance(event, Rollout) and event.tool_tokens == len(SAID) for event in schedule.events)
    calls = Counter(schedule.tool.seen)
    assert calls["create"] == calls["2+2"] == calls["release"]
    assert sessions <= calls["2+2"] <= sessions * (1 + schedule.restarts), "once in a life of the run"


async def test_a_tool_that_cancels_itself_fails_its_rollout_and_is_reported(queue: Queue) -> None:

    class Cancels(CalculatorTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            raise asyncio.CancelledError("its client was closed")

    worker = ToolWorker(Server(calls_then_answers), Cancels({"type": "native"}, SCHEMA))
    await worker.start([asked()])
    assert await worker.finish() == [Failure("g2", 0, "CancelledError", len(CALLED))]
    assert queue.rows == {}


async def test_a_failing_tool_is_the_models_to_deal_with() -> None:
    worker = ToolWorker(Server(calls_then_answers), CalculatorTool({"type": "native", "fail_every": 1}, SCHEMA))
    await worker.start([asked()])
    (rollout,) = await worker.finish()
    assert isinstance(rollout, Rollout)
    assert (rollout.reward, rollout.tokens) == (1.0, len(CALLED + ANSWERED))


async def test_what_was_generated_and_cut_off_is_charged(queue: Queue) -> None:
    """Else a rollout that had paused with more than it ends with would take tokens back."""
    worker = ToolWorker(Server(calls_then_answers), Calls())
    worker.rollout_config.response_length = len(CALLED + SAID) + 1
    await worker.start([asked()])
    (rollout,) = await worker.finish()
    assert isinstance(rollout, Rollout)
    (row,) = queue.rows.values()
    assert int(row["response_mask"].sum()) == len(CALLED) + 1 < rollout.tokens == len(CALLED + ANSWERED)
    assert rollout.truncated


@pytest.mark.parametrize(("key", "value"), [("seconds", -1), ("fail_every", -2)])
def test_settings_of_the_tool_that_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"calculator\.{key}={value}.* is not accepted: 0 "):
        CalculatorTool({"type": "native", key: value}, SCHEMA)
