"""The tools of verl's agent loops, whose replies are kept with the session that called them.

A rollout that was saved unfinished goes on by running its agent loop again: saved answers stand for those of rollout
servers, and saved replies for those of tools. So no tool is called twice for a reply that was saved. A call that was
under way when the run was cut is made again. Replies with pictures are not saved; such a call is made again too.
A tool with ``stateful: true`` in its config is called again for every reply, so that its state is what it was.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse

from goldilocks.hashing import content_key
from goldilocks.verl.dispatch.session import Session, ToolReply, current_session

Answered = tuple[ToolResponse, float | None, dict[str, Any]]  # verl's reply of a tool, its reward and its metrics


def remembering(tool: Any) -> Any:
    """Return the tool, with replies that are kept for the session that calls it."""
    if isinstance(tool, FunctionTool):
        return dataclasses.replace(tool, fn=functools.partial(_call, tool), is_async=True)
    return tool if tool.config.get("stateful") else RememberingTool(tool)


async def _call(tool: FunctionTool, /, **arguments: Any) -> Answered:
    session = current_session.get()

    async def call() -> Answered:
        return normalize_function_tool_return(await tool.call(arguments))

    if session is None:  # validation
        return await call()
    return await _remembered(session, _next_place(session), [tool.name, arguments], call)


class RememberingTool(BaseTool):
    """A tool with a lifecycle. An instance is created only when it is asked for something new."""

    def __init__(self, tool: Any) -> None:
        self._tool = tool
        self._calls: dict[str, _Call] = {}
        self.config, self.tool_schema, self.name = tool.config, tool.tool_schema, tool.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)

    def get_openai_tool_schema(self) -> Any:
        return self._tool.get_openai_tool_schema()

    async def create(self, *args: Any, **kwargs: Any) -> tuple[str, ToolResponse]:
        """As the tool's. Its response is empty where the first reply is a saved one: no instance is created then."""
        session = current_session.get()
        if session is None:  # validation
            created: tuple[str, ToolResponse] = await self._tool.create(*args, **kwargs)
            return created
        place = _next_place(session)
        call = _Call(place, functools.partial(self._tool.create, *args, **kwargs))
        response = ToolResponse() if place in session.replies else (await call.begin())[1]
        name = f"{session.uid}_{session.index}_{place}"
        self._calls[name] = call
        return name, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Answered:
        call = self._calls.get(instance_id)
        if call is None:
            answered: Answered = await self._tool.execute(instance_id, parameters, **kwargs)
            return answered

        async def execute() -> Answered:
            instance, _ = await call.begin()
            answered: Answered = await self._tool.execute(instance, parameters, **kwargs)
            return answered

        session = current_session.get()
        assert session is not None
        return await _remembered(session, call.next_place(session), [self.name, parameters], execute)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        call = self._calls.get(instance_id)
        if call is None:
            plain: float = await self._tool.calc_reward(instance_id, **kwargs)
            return plain

        async def calc_reward() -> Answered:
            instance, _ = await call.begin()
            return ToolResponse(), await self._tool.calc_reward(instance, **kwargs), {}

        session = current_session.get()
        assert session is not None
        asked = [self.name, "calc_reward"]
        _, reward, _ = await _remembered(session, call.next_place(session), asked, calc_reward)
        assert reward is not None
        return reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        call = self._calls.pop(instance_id, None)
        if call is None:
            await self._tool.release(instance_id, **kwargs)
        elif call.created is not None:
            await self._tool.release(call.created[0], **kwargs)


class _Call:
    """A call of a tool: the how many-th of its session, and the instance that was created for it."""

    def __init__(self, place: int, create: Callable[[], Awaitable[tuple[str, ToolResponse]]]) -> None:
        self._place: int | None = place
        self._create = create
        self.created: tuple[str, ToolResponse] | None = None

    async def begin(self) -> tuple[str, ToolResponse]:
        """Return the instance and the tool's response to its creation."""
        if self.created is None:
            self.created = await self._create()
        return self.created

    def next_place(self, session: Session) -> int:
        """Return the place of the next request to the instance.

        The first has the place that ``create`` drew: calls side by side keep their order, whichever is created first.
        """
        place, self._place = self._place, None
        return _next_place(session) if place is None else place


def _next_place(session: Session) -> int:
    session.called += 1
    return session.called - 1


async def _remembered(
    session: Session, place: int, asked: list[Any], call: Callable[[], Awaitable[Answered]]
) -> Answered:
    """Return the saved reply at this place if the same is asked, else make the call and keep its reply."""
    name = f"{content_key(asked):x}"
    saved = session.replies.get(place)
    if saved is not None and saved.call == name:
        return ToolResponse(text=saved.text), saved.reward, {}
    response, reward, metrics = await call()
    if not response.image and not response.video:
        plain = None if reward is None else float(reward)
        session.replies[place] = ToolReply(place, name, response.text, plain)
    return response, reward, metrics
