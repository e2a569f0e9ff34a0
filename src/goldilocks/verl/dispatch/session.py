"""One rollout in the making: what it asks a rollout server for, what it is answered, and the event it ends with.

A rollout that pauses is asked for again with what it has written behind its prompt, so an answer may have parts by
several policies. Every token keeps the log-prob and the version of the policy that wrote it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from goldilocks.engine.request import Generation
from goldilocks.rewards import is_number
from goldilocks.runs.records import row_key
from goldilocks.types import Rollout
from goldilocks.verl.store.behaviour import VERSIONS

PER_TOKEN = ("top_log_probs",)  # extra fields that have a value for each token

Versions = list[list[Any]]  # [version, how many tokens it wrote], in the order of the tokens; None: unknown


@dataclass
class ResumableAnswer:
    """The answer to one request: the parts that servers have returned, in order."""

    prompt: str  # the name of what was asked
    parts: list[TokenOutput] = field(default_factory=list)
    done: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids]

    @property
    def versions(self) -> Versions:
        """The tokens of each policy; a rollout may pause more than once under one policy."""
        written = [part for part in self.parts if part.token_ids]
        by_version = itertools.groupby(written, lambda part: part.extra_fields.get("global_steps"))
        return [[version, sum(len(part.token_ids) for part in parts)] for version, parts in by_version]

    def output(self) -> TokenOutput:
        """All parts as one output; fields without a value for each token are those of the last part."""
        if len(self.parts) == 1:
            return self.parts[0]
        last = self.parts[-1]
        columns = {name: self._joined([part.extra_fields.get(name) for part in self.parts]) for name in PER_TOKEN}
        return last.model_copy(
            update={
                "token_ids": self.token_ids,
                "log_probs": self._joined([part.log_probs for part in self.parts]),
                "routed_experts": self._routed_experts(),
                "num_preempted": sum(part.num_preempted or 0 for part in self.parts),
                "extra_fields": {
                    **{name: value for name, value in last.extra_fields.items() if name not in PER_TOKEN},
                    **{name: column for name, column in columns.items() if column is not None},
                    **_oldest_and_newest(self.versions),
                },
            }
        )

    def _joined(self, columns: Sequence[list[Any] | None]) -> list[Any] | None:
        """Join the values of the parts; None if a part has tokens and no values."""
        if any(column is None and part.token_ids for part, column in zip(self.parts, columns, strict=True)):
            return None
        return [value for column in columns for value in column or ()]

    def _routed_experts(self) -> Any:
        """A server returns the experts of the whole sequence; of a later part, only its own tokens count."""
        rows = None
        for part in self.parts:
            if part.routed_experts is not None and part.token_ids:
                own = part.routed_experts if rows is None else part.routed_experts[-len(part.token_ids) :]
                rows = own if rows is None else np.concatenate([rows, own])
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "done": self.done, "parts": [_packed(part) for part in self.parts]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> ResumableAnswer:
        return cls(state["prompt"], [_unpacked(part) for part in state["parts"]], state["done"])


def _oldest_and_newest(versions: Versions) -> dict[str, int | None]:
    known = [version for version, _ in versions if version is not None]
    return {"min_global_steps": min(known, default=None), "max_global_steps": max(known, default=None)}


def name_of(prompt_ids: Sequence[int]) -> str:
    """A name for a prompt: a saved answer continues only if the same prompt is asked again."""
    return hashlib.blake2b(np.asarray(prompt_ids, dtype=np.int64).tobytes(), digest_size=16).hexdigest()


def _packed(part: TokenOutput) -> dict[str, Any]:
    """The fields, with columns of tokens as arrays."""
    fields = {**part.model_dump(), "token_ids": np.array(part.token_ids, dtype=np.int64)}
    extra = {name: _array(value) if name in PER_TOKEN else value for name, value in part.extra_fields.items()}
    return {**fields, "log_probs": _array(part.log_probs), "extra_fields": extra}


def _array(values: list[float] | None) -> np.ndarray | None:
    return None if values is None else np.array(values, dtype=np.float32)


def _unpacked(fields: Mapping[str, Any]) -> TokenOutput:
    extra = {name: _list(value) if name in PER_TOKEN else value for name, value in fields["extra_fields"].items()}
    columns = {name: _list(fields[name]) for name in ("token_ids", "log_probs")}
    return TokenOutput(**{**fields, **columns, "extra_fields": extra})


def _list(values: np.ndarray | None) -> list[Any] | None:
    return None if values is None else values.tolist()


@dataclass(eq=False)
class Session:
    """What a rollout has cost so far, and at which server it is."""

    uid: str
    index: int
    tokens: int = 0  # that servers have returned
    server: Any = None  # that works on it now
    request_id: str = ""  # by which that server knows it
    aborted: bool = False  # whether that server was asked to end it
    answers: list[ResumableAnswer] = field(default_factory=list)  # to its requests, in order
    asked: int = 0  # requests that its agent loop has made
    task: asyncio.Task[Any] | None = None  # while its agent loop runs

    def align(self, outputs: Sequence[Any]) -> None:
        """Give each output the values of its own tokens: verl's loops keep those of the first answer."""
        if len(self.answers) == len(outputs) == 1:
            return
        for name in PER_TOKEN:
            found = [answer.output().extra_fields.get(name) for answer in self.answers]
            whole = [column for column in found if column is not None]
            values = [value for column in whole for value in column] if len(whole) == len(found) else None
            rows = None if values is None else _by_token(values, [one.response_mask for one in outputs])
            for place, one in enumerate(outputs):
                one.extra_fields.pop(name, None)
                if rows is not None:
                    one.extra_fields[name] = rows[place]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within, ``stop`` ends the task of this session: its rows are not being graded or stored."""
        self.task = asyncio.current_task()
        try:
            yield
        finally:
            self.task = None

    def stop(self) -> None:
        """End the agent loop where it waits, once: verl's then releases its tool, which may take a while."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()

    @property
    def versions(self) -> Versions:
        """Which policy wrote how many of its tokens, in order."""
        return [span for answer in self.answers for span in answer.versions]

    def next_answer(self, prompt_ids: Sequence[int]) -> ResumableAnswer:
        """The answer to the agent loop's next request: the saved one if the request is the same, or a new one."""
        name, place = name_of(prompt_ids), self.asked
        self.asked += 1
        if place < len(self.answers) and self.answers[place].prompt == name:
            return self.answers[place]
        self.answers[place:] = [ResumableAnswer(name)]  # one that was saved for another request is dropped
        return self.answers[place]


current_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)


class Cancelled(Exception):
    """The group of this session is no longer needed."""


class NotNow(Exception):
    """Generation is paused: the request was not sent."""


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """The request of a single-turn session."""

    session: Session
    prompt_ids: list[int]
    params: dict[str, Any]
    name: str = field(default_factory=lambda: uuid4().hex)  # of the request


@dataclass(frozen=True)
class Reply:
    """The outcome of a turn: what our server or verl's made, or the reason why there is nothing."""

    turn: TurnRequest
    outcome: Generation | TokenOutput | BaseException
    global_steps: int | None = None  # the policy update that wrote it; an answer of verl's server has its own

    @property
    def extra_fields(self) -> dict[str, Any]:
        """What verl's client returns beside the tokens."""
        made = self.outcome
        assert not isinstance(made, BaseException)
        if isinstance(made, TokenOutput):
            about = made.extra_fields
        else:
            about = {"global_steps": self.global_steps, "top_log_probs": made.top_log_probs}
        version = about.get("global_steps")
        return {**about, "min_global_steps": version, "max_global_steps": version}


Deliver = Callable[[list[Reply]], None]


def rollout_of(
    session: Session, outputs: list[Any], global_steps: int, response_length: int, versions: Versions
) -> Rollout:
    """The event of a session whose rows are stored; each of ``outputs``, of verl's agent loop, is a row."""
    final, uid, index = outputs[-1], session.uid, session.index
    info = final.extra_fields.get("reward_extra_info") or {}
    counts = [sum(one.response_mask) for one in outputs]
    spans = _by_row(versions, counts)
    whole = [versions] * len(outputs) if spans is None else spans
    tags = [_tag(one, global_steps, own) for one, own in zip(outputs, whole, strict=True)]
    for tag, own in zip(tags, spans or (), strict=False):
        if tag["min_global_steps"] != tag["max_global_steps"]:
            tag[VERSIONS] = own
    version = min((tag["min_global_steps"] for tag in tags if tag["min_global_steps"] is not None), default=None)
    return Rollout(
        uid,
        index,
        reward=float(final.reward_score),
        tokens=max(session.tokens, sum(counts)),  # rows may leave some out
        metrics={name: float(value) for name, value in info.items() if is_number(value)},
        truncated=len(final.response_ids) >= response_length,
        version=None if version is None else int(version),
        payload=[[row_key(uid, index, part), tag] for part, tag in enumerate(tags)],
        tool_tokens=sum(len(one.response_mask) for one in outputs) - sum(counts),
    )


def _by_row(versions: Versions, counts: list[int]) -> list[Versions] | None:
    """Divide the tokens that policies wrote among the rows they stand in; None where rows have others than those."""
    if len(counts) == 1:
        return [versions]  # a row that was cut has the first of them
    if sum(counts) != sum(count for _, count in versions):
        return None
    tokens = iter([version for version, count in versions for _ in range(count)])
    rows = (itertools.groupby(itertools.islice(tokens, count)) for count in counts)
    return [[[version, len(list(written))] for version, written in row] for row in rows]


def _by_token(values: Sequence[float], masks: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """Lay the values of generated tokens out over rows, with 0 for other tokens; None where rows have other tokens."""
    written = sum(map(sum, masks))
    if written > len(values) or (len(masks) > 1 and written < len(values)):
        return None
    left = iter(values)
    return [[next(left) if generated else 0.0 for generated in mask] for mask in masks]


def _tag(output: Any, global_steps: int, versions: Versions) -> dict[str, Any]:
    """The tag that verl's worker gives a trajectory, with the policies that wrote it."""
    prompt_len, response_len = len(output.prompt_ids), len(output.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": global_steps,
        **_oldest_and_newest(versions),
    }
