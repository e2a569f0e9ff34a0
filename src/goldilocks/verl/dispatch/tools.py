"""The tools of verl's agent loops, whose replies are kept with the session that called them.

A rollout that was saved unfinished goes on by running its agent loop again: saved answers stand for those of rollout
servers, and saved replies for those of tools. So no tool is called twice for a reply that was saved. A call that was
under way when the run was cut is made again. Replies with pictures are not saved; such a call is made again too.
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
    return RememberingTool(tool)


async def _call(tool: FunctionTool, **arguments: Any) -> Answered:
    session = current_session.get()

    async def call() -> Answered:
        return normalize_function_tool_return(await tool.call(arguments))

    if session is None:  # validation
        return await call()
    return await _remembered(session, _next_place(session), f"{content_key([tool.name, arguments]):x}", call)


class RememberingTool(BaseTool):
    """A tool with a lifecycle. An instance is created only when it is asked for something new."""

    def __init__(self, tool: Any) -> None:
        self._tool = tool
        self._calls: dict[str, _Call] = {}
        self.config, self.tool_schema, self.name = tool.config, tool.tool_schema, tool.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)

    async def create(self, *args: Any, **kwargs: Any) -> tuple[str, ToolResponse]:
        session = current_session.get()
        if session is None:  # validation
            created: tuple[str, ToolResponse] = await self._tool.create(*args, **kwargs)
            return created
        name = f"{session.uid}_{session.index}_{session.called}"
        call = self._calls[name] = _Call(_next_place(session), functools.partial(self._tool.create, *args, **kwargs))
        if call.place not in session.replies:
            await call.begin()
        return name, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Answered:
        call = self._calls.get(instance_id)
        if call is None:
            answered: Answered = await self._tool.execute(instance_id, parameters, **kwargs)
            return answered

        async def execute() -> Answered:
            await call.begin()
            answered: Answered = await self._tool.execute(call.instance, parameters, **kwargs)
            return answered

        session = current_session.get()
        assert session is not None
        return await _remembered(session, call.place, f"{content_key([self.name, parameters]):x}", execute)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        call = self._calls.pop(instance_id, None)
        if call is None:
            await self._tool.release(instance_id, **kwargs)
        elif call.instance is not None:
            await self._tool.release(call.instance, **kwargs)


class _Call:
    """A call of a tool: the how many-th of its session, and the instance that was created for it."""

    def __init__(self, place: int, create: Callable[[], Awaitable[tuple[str, Any]]]) -> None:
        self.place = place
        self._create = create
        self.instance: str | None = None

    async def begin(self) -> None:
        if self.instance is None:
            self.instance, _ = await self._create()


def _next_place(session: Session) -> int:
    session.called += 1
    return session.called - 1


async def _remembered(session: Session, place: int, name: str, call: Callable[[], Awaitable[Answered]]) -> Answered:
    """Return the saved reply at this place if the call is the same, else make the call and keep its reply."""
    saved = session.replies.get(place)
    if saved is not None and saved.call == name:
        return ToolResponse(text=saved.text), saved.reward, {}
    response, reward, metrics = await call()
    if not response.image and not response.video:
        plain = None if reward is None else float(reward)
        session.replies[place] = ToolReply(place, name, response.text, plain)
    return response, reward, metrics
