"""verl's own tool agent loop in our worker: what tools write is no answer, and no tool works for nothing or twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.workers.config import RolloutConfig
from verl_world import Server, Worker, prompt, worker_queue, written

from goldilocks.config.recipes import CONFIG
from goldilocks.engine.request import Generation
from goldilocks.tasks.calculator import CALL, CLOSE, TOOL, Calculator
from goldilocks.tasks.calculator_tool import CalculatorTool
from goldilocks.tasks.tiny_model import calling_tokenizer
from goldilocks.types import Failure, Rollout
from goldilocks.verl.dispatch.session import Session, current_session
from goldilocks.verl.dispatch.tools import remembering
from goldilocks.verl.store.rows import ANSWERS, FIRST

TOKENIZER = calling_tokenizer()
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
        self.tools = [remembering(tool) for tool in tools]


def asked(n: int = 1, **fields: Any) -> dict[str, Any]:
    row = prompt(2, n, agent_name="tool_agent", data_source=Calculator.data_source)
    return {**row, "reward_model": {"style": "rule", "ground_truth": "4"}, **fields}


def calls_then_answers(name: str, prompt_ids: list[int], seed: int) -> Generation:
    """A model that calls the tool, and says what the tool has said."""
    return written(name, ANSWERED if TOKENIZER.convert_tokens_to_ids(TOOL) in prompt_ids else CALLED)


async def until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 60)


def test_what_a_tool_wrote_is_masked_and_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = worker_queue(monkeypatch)

    async def main() -> tuple[Rollout | Failure, list[str]]:
        tool = Calls()
        worker = ToolWorker(Server(calls_then_answers), tool)
        await worker.start([asked()])
        return (await worker.finish())[0], tool.seen

    rollout, seen = asyncio.run(main())
    assert isinstance(rollout, Rollout)
    assert seen == ["create", "2+2", "release"]
    assert (rollout.reward, rollout.tokens, rollout.tool_tokens) == (1.0, len(CALLED + ANSWERED), len(SAID))
    assert not rollout.truncated
    (row,) = queue.rows.values()
    assert row["responses"].tolist() == CALLED + SAID + ANSWERED
    mask = [1] * len(CALLED) + [0] * len(SAID) + [1] * len(ANSWERED)
    assert row["response_mask"].tolist() == row["loss_mask"].tolist() == mask
    assert [value != 0 for value in row["rollout_log_probs"].tolist()] == [bool(kept) for kept in mask]
    assert row["extra_fields"]["top_log_probs"] == [-0.5 if kept else 0.0 for kept in mask]  # which gate 2 reads


def test_a_cancelled_group_ends_its_calls_and_the_tool_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = worker_queue(monkeypatch)

    async def main() -> tuple[list[Rollout | Failure], list[str]]:
        tool = Calls()
        tool.let.clear()  # it never answers
        worker = ToolWorker(Server(calls_then_answers), tool)
        await worker.start([asked(3)])
        while tool.seen.count("2+2") < 3:
            await until(tool.called)
            await asyncio.sleep(0)
        await worker.cancel(["g2"])
        return await worker.finish(), tool.seen

    events, seen = asyncio.run(main())
    assert events == [Failure("g2", index, "cancelled", len(CALLED)) for index in range(3)]
    assert seen.count("release") == 3
    assert queue.rows == {}


def test_a_call_that_was_complete_when_its_group_was_cancelled_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_queue(monkeypatch)

    async def main() -> tuple[list[Rollout | Failure], list[str]]:
        tool, server = Calls(), Server(aborts=False)
        worker = ToolWorker(server, tool)
        await worker.start([asked()])
        (name,) = await server.holds(1)
        await worker.cancel(["g2"])
        server.answer(name, CALLED)
        return await worker.finish(), tool.seen

    events, seen = asyncio.run(main())
    assert (events, seen) == ([Failure("g2", 0, "cancelled", len(CALLED))], [])


@pytest.mark.parametrize("function", [False, True], ids=["with a lifecycle", "function"])
def test_a_conversation_that_pauses_or_is_saved_goes_on_without_a_second_call(
    monkeypatch: pytest.MonkeyPatch, function: bool
) -> None:
    worker_queue(monkeypatch)

    async def main() -> None:
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
        session = next(worker.llm_client.unfinished)
        while not session.replies:
            await asyncio.sleep(0)
        ((_, index, saved),) = await worker.answers()
        assert not server.held  # nothing is asked while generation is paused
        await worker.resume()
        server.answer((await server.holds(1))[0], ANSWERED)
        (rollout,) = await worker.finish()
        assert tool.seen.count("2+2") == 1

        again_server = Server()
        again = ToolWorker(again_server, given)
        await again.start([asked(**{ANSWERS: {index: saved}})])
        again_server.answer((await again_server.holds(1))[0], ANSWERED)
        assert again_server.prompts[0][-len(SAID) :] == SAID
        assert await again.finish() == [rollout]
        assert tool.seen.count("2+2") == 1
        assert tool.seen.count("create") == tool.seen.count("release") == (0 if function else 1)

    asyncio.run(main())


class Schedule:
    """Conversations that are paused, cut by a restart and answered in any order, without a clock.

    Between two actions every session is held by its server, so that every call of the tool has its reply.
    """

    def __init__(self, sessions: int) -> None:
        self.tool, self.server = Calls(), Server()
        self.worker = ToolWorker(self.server, self.tool)
        self.left = sessions
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
        saved = {index: states for _, index, states in await self.worker.answers()}
        for task in self.worker.background_tasks:
            task.cancel()
        await asyncio.gather(*self.worker.background_tasks, return_exceptions=True)
        self.server = Server()
        self.worker = ToolWorker(self.server, self.tool)
        for index, states in saved.items():
            await self.worker.start([asked(**{FIRST: index, ANSWERS: {index: states}})])


@settings(max_examples=4)
@example(2, ["pause", "answer", "pause", "restart", "answer", "restart", "pause", "answer"])
@given(st.integers(1, 3), st.lists(st.sampled_from(["pause", "answer", "restart"]), max_size=8))
def test_however_conversations_pause_and_restart_each_calls_its_tool_once(sessions: int, actions: list[str]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        worker_queue(monkeypatch)

        async def main() -> Schedule:
            schedule = Schedule(sessions)
            await asyncio.wait_for(schedule.run(actions), 600)
            return schedule

        schedule = asyncio.run(main())
    assert sorted(event.index for event in schedule.events) == list(range(sessions))
    assert all(isinstance(event, Rollout) and event.tool_tokens == len(SAID) for event in schedule.events)
    assert Counter(schedule.tool.seen) == {"create": sessions, "2+2": sessions, "release": sessions}


class Counts(Calls):
    """A tool with a state: it says how often its instance was asked, and is worth as much."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.asked: Counter[str] = Counter()

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return SCHEMA.model_copy(update={"type": "counts"})

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.seen.append("create")
        if kwargs.get("broken"):
            raise ConnectionError("no sandbox")
        return f"instance {len(self.seen)}", ToolResponse(text="hello")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.asked[instance_id] += 1
        return ToolResponse(text=str(self.asked[instance_id])), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.seen.append("calc_reward")
        return float(self.asked[instance_id])


async def asked_twice(tool: Any) -> tuple[Any, ...]:
    """What an agent loop of one's own may do with an instance."""
    instance, created = await tool.create()
    replies = [(await tool.execute(instance, {"expression": "2+2"}))[0].text for _ in range(2)]
    reward = await tool.calc_reward(instance)
    await tool.release(instance)
    return created.text, replies, reward


def test_an_instance_is_asked_as_often_as_the_agent_loop_asks_and_says_what_it_is_worth() -> None:
    async def main() -> None:
        tool = Counts()
        kept, session = remembering(tool), Session("g", 0)
        assert kept.get_openai_tool_schema().type == "counts"
        current_session.set(session)
        assert await asked_twice(kept) == ("hello", ["1", "2"], 2.0)
        current_session.set(Session.restored("g", 0, session.saved()))
        assert (await asked_twice(kept))[1:] == (["1", "2"], 2.0)
        assert tool.seen == ["create", "calc_reward", "release"]  # once: the second time nothing was new

    asyncio.run(main())


def test_a_tool_that_cannot_be_created_leaves_nothing_behind() -> None:
    async def main() -> None:
        kept = remembering(Counts())
        current_session.set(Session("g", 0))
        with pytest.raises(ConnectionError):
            await kept.create(broken=True)
        assert not kept._calls

    asyncio.run(main())


def test_calls_of_a_tool_with_a_state_are_made_again_after_a_restart() -> None:
    async def main() -> None:
        tool = Counts(stateful=True)
        kept, session = remembering(tool), Session("g", 0)
        for _ in range(2):
            session = Session.restored("g", 0, session.saved())
            current_session.set(session)
            assert await asked_twice(kept) == ("hello", ["1", "2"], 2.0)
        assert tool.seen == ["create", "calc_reward", "release"] * 2

    asyncio.run(main())


def test_a_function_may_have_a_parameter_of_any_name() -> None:
    async def main() -> Any:
        current_session.set(Session("g", 0))
        given = FunctionTool("calculator", lambda tool, session: tool + session, SCHEMA, is_async=False)
        return await remembering(given).call({"tool": "4", "session": "2"})

    assert asyncio.run(main())[0].text == "42"


def test_a_tool_that_cancels_itself_fails_its_rollout_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = worker_queue(monkeypatch)

    class Cancels(CalculatorTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            raise asyncio.CancelledError("its client was closed")

    async def main() -> list[Rollout | Failure]:
        worker = ToolWorker(Server(calls_then_answers), Cancels({"type": "native"}, SCHEMA))
        await worker.start([asked()])
        return await asyncio.wait_for(worker.finish(), 60)

    assert asyncio.run(main()) == [Failure("g2", 0, "CancelledError", len(CALLED))]
    assert queue.rows == {}


def test_a_failing_tool_is_the_models_to_deal_with(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_queue(monkeypatch)

    async def main() -> Any:
        worker = ToolWorker(Server(calls_then_answers), CalculatorTool({"type": "native", "fail_every": 1}, SCHEMA))
        await worker.start([asked()])
        return (await worker.finish())[0]

    rollout = asyncio.run(main())
    assert isinstance(rollout, Rollout)
    assert (rollout.reward, rollout.tokens) == (1.0, len(CALLED + ANSWERED))


def test_what_was_generated_and_cut_off_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rollout that had paused with more than it ends with would take tokens back."""
    queue = worker_queue(monkeypatch)

    async def main() -> Any:
        worker = ToolWorker(Server(calls_then_answers), Calls())
        worker.rollout_config.response_length = len(CALLED + SAID) + 1
        await worker.start([asked()])
        return (await worker.finish())[0]

    rollout = asyncio.run(main())
    assert isinstance(rollout, Rollout)
    (row,) = queue.rows.values()
    assert int(row["response_mask"].sum()) == len(CALLED) + 1 < rollout.tokens == len(CALLED + ANSWERED)
    assert rollout.truncated


@pytest.mark.parametrize(("key", "value"), [("seconds", -1), ("fail_every", -2)])
def test_settings_of_the_tool_that_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"calculator\.{key}={value}.* is not accepted: 0 "):
        CalculatorTool({"type": "native", key: value}, SCHEMA)
