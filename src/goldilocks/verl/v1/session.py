"""One rollout in the making, what it asks a rollout server for, and what it is answered."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from goldilocks.engine.request import Generation
from goldilocks.verl.v1.answer import Answer, Versions, name_of


@dataclass(eq=False)
class Session:
    """One rollout in the making: what it has cost so far, and where it is."""

    uid: str
    index: int
    tokens: int = 0  # that servers have returned
    server: Any = None  # that works on it now
    request_id: str = ""  # by which that server knows it
    aborted: bool = False  # whether that server was asked to end it
    answers: list[Answer] = field(default_factory=list)  # to its requests, in order
    asked: int = 0  # requests that its agent loop has made

    @property
    def versions(self) -> Versions:
        """Which policy wrote how many of its tokens, in order."""
        return [span for answer in self.answers for span in answer.versions]

    def next_answer(self, prompt_ids: Sequence[int]) -> Answer:
        """The answer to the next request of the agent loop: a new one, or the one that was saved for it."""
        name, place = name_of(prompt_ids), self.asked
        self.asked += 1
        if place < len(self.answers) and self.answers[place].prompt == name:
            return self.answers[place]
        self.answers[place:] = [Answer(name)]  # what comes after another question is not the answer to this one
        return self.answers[place]


current_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)


class Cancelled(Exception):
    """The group of this session is no longer needed."""


class NotNow(Exception):
    """Generation is paused: the request was not sent."""


@dataclass(frozen=True, eq=False)
class Turn:
    """What a session of a wave asks a server for."""

    session: Session
    prompt_ids: list[int]
    params: dict[str, Any]
    name: str = field(default_factory=lambda: uuid4().hex)  # of the request


@dataclass(frozen=True)
class Reply:
    """To a turn: a generation, or the reason why there is none."""

    turn: Turn
    outcome: Generation | BaseException
    global_steps: int | None = None  # the policy update that wrote it


Deliver = Callable[[list[Reply]], None]
