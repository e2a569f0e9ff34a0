"""One rollout in the making: its noise, what it asks a rollout server for, the answers, and the event it ends with.

A rollout that pauses is asked for again with what it has written behind its prompt, so an answer may have parts by
several policies. Every token keeps the log-prob and the version of the policy that wrote it.

The seed of a rollout's noise is a function of the run's seed, the prompt, the visit and the index. Two runs with one
seed draw the same noise for the same rollout, whatever else is generated, in any order, at any server.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from goldilocks.hashing import hashed
from goldilocks.rewards import is_number
from goldilocks.types import Rollout, row_key
from goldilocks.verl.store import VERSIONS

# The fields that the backend adds to a prompt's row for the worker.
ROLLOUTS = "__rollout_n__"  # how many sessions to run: verl's own name
FIRST = "__rollout_first__"  # the index of the first of them
VISIT_SEED = "__visit_seed__"  # the seed of the noise of all of them
ANSWERS = "__answers__"  # by index, the saved answers of unfinished rollouts

TOP_LOG_PROBS = "top_log_probs"  # the extra field with the largest log-prob at each token

Versions = list[list[Any]]  # [version, how many tokens it wrote], in the order of the tokens; None: unknown


# -- the noise ---------------------------------------------------------------------------------------------------------

RunSeeds = tuple[object, object]  # of the data and of the rollouts

VALIDATION = -1  # the visit of every validation, so that all draw the same noise

# The name of the seed in each engine's sampling parameters. Engines other than ours sample more slowly with a seed in
# each request, so they get one only with `rollout.full_determinism`.
_SEED_OF = {"transformers": "seed", "vllm": "seed", "sglang": "sampling_seed"}
_ALWAYS_SEEDED = ("transformers",)


def run_seeds(config: Any) -> RunSeeds:
    """The seeds in verl's config. Read them once: OmegaConf takes longer to read a key than a seed takes to compute."""
    return config.data.get("seed"), config.actor_rollout_ref.rollout.seed


def visit_seed(seeds: RunSeeds, key: int, place: object, visit: int) -> int:
    """The seed of one visit to a prompt; ``place`` is its place in the data, so that copies get different answers."""
    return hashed(*seeds, key, place, visit)


def seeded(sampling_params: Mapping[str, Any], rollout_config: Any, visit: int, index: int) -> dict[str, Any]:
    """The sampling parameters of rollout ``index`` of the visit whose seed is ``visit``."""
    name = _SEED_OF.get(rollout_config.name)
    if name is None or not (rollout_config.name in _ALWAYS_SEEDED or rollout_config.full_determinism):
        return dict(sampling_params)
    return {**sampling_params, name: hashed(visit, index)}


def of_turn(sampling_params: Mapping[str, Any], rollout_config: Any, turn: int) -> dict[str, Any]:
    """The sampling parameters of a conversation's request number ``turn``, counted from 0."""
    return _reseeded(sampling_params, rollout_config, "turn", turn) if turn else dict(sampling_params)


def continued(sampling_params: Mapping[str, Any], rollout_config: Any, *, prompt: int, written: int) -> dict[str, Any]:
    """The sampling parameters of the rest of an answer that has ``written`` tokens, to a prompt of ``prompt`` tokens.

    Without a limit in the parameters the rest ends where verl's servers would have ended the whole answer.
    """
    if not written:
        return dict(sampling_params)
    params = _reseeded(sampling_params, rollout_config, written)
    left = rollout_config.prompt_length + rollout_config.response_length - prompt
    limit = params.pop("max_new_tokens", min(rollout_config.response_length, left))
    params["max_tokens"] = params.get("max_tokens", limit) - written
    return params


def _reseeded(sampling_params: Mapping[str, Any], rollout_config: Any, *parts: object) -> dict[str, Any]:
    """Change the seed for a later request of the same rollout.

    Our engine draws by the seed and the position in the whole text, so it keeps the seed. Other engines draw by the
    seed and the position in the request: the same seed would repeat the noise.
    """
    params, name = dict(sampling_params), _SEED_OF.get(rollout_config.name)
    if name in params and rollout_config.name not in _ALWAYS_SEEDED:
        params[name] = hashed(params[name], *parts)
    return params


def request_number(row: Mapping[str, Any]) -> int:
    """A number for each rollout. With ``full_determinism`` verl names a request by its priority, 0 for all of them."""
    return hashed(row["uid"], row["session_id"])


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass
class ResumableAnswer:
    """The answer to one request: the parts that servers have returned, in order."""

    prompt: str  # the ``name_of`` the prompt
    parts: list[TokenOutput] = field(default_factory=list)
    done: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids]

    @property
    def versions(self) -> Versions:
        """Which policy wrote how many of the tokens; parts that one policy wrote in a row count as one."""
        written = [part for part in self.parts if part.token_ids]
        by_version = itertools.groupby(written, lambda part: part.extra_fields.get("global_steps"))
        return [[version, sum(len(part.token_ids) for part in parts)] for version, parts in by_version]

    def output(self) -> TokenOutput:
        """All parts as one output; fields without a value for each token are those of the last part."""
        if len(self.parts) == 1:
            return self.parts[0]
        last = self.parts[-1]
        extra = {**last.extra_fields, **_oldest_and_newest(self.versions)}
        extra.pop(TOP_LOG_PROBS, None)
        top_log_probs = self._concatenated([part.extra_fields.get(TOP_LOG_PROBS) for part in self.parts])
        if top_log_probs is not None:
            extra[TOP_LOG_PROBS] = top_log_probs
        return last.model_copy(
            update={
                "token_ids": self.token_ids,
                "log_probs": self._concatenated([part.log_probs for part in self.parts]),
                "routed_experts": self._routed_experts(),
                "num_preempted": sum(part.num_preempted or 0 for part in self.parts),
                "extra_fields": extra,
            }
        )

    def _concatenated(self, columns: Sequence[list[Any] | None]) -> list[Any] | None:
        """The values of all parts; None if a part has tokens and no values."""
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
        """JSON values, and arrays for what has a value for each token."""
        parts = []
        for part in self.parts:
            extra = dict(part.extra_fields)
            if extra.get(TOP_LOG_PROBS) is not None:
                extra[TOP_LOG_PROBS] = np.array(extra[TOP_LOG_PROBS], dtype=np.float32)
            log_probs = None if part.log_probs is None else np.array(part.log_probs, dtype=np.float32)
            arrays = {"token_ids": np.array(part.token_ids, dtype=np.int64), "log_probs": log_probs}
            parts.append({**part.model_dump(), **arrays, "extra_fields": extra})
        return {"prompt": self.prompt, "done": self.done, "parts": parts}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> ResumableAnswer:
        parts = []
        for fields in state["parts"]:
            extra = dict(fields["extra_fields"])
            if extra.get(TOP_LOG_PROBS) is not None:
                extra[TOP_LOG_PROBS] = extra[TOP_LOG_PROBS].tolist()
            log_probs = None if fields["log_probs"] is None else fields["log_probs"].tolist()
            lists = {"token_ids": fields["token_ids"].tolist(), "log_probs": log_probs}
            parts.append(TokenOutput(**{**fields, **lists, "extra_fields": extra}))
        return cls(state["prompt"], parts, state["done"])


def name_of(prompt_ids: Sequence[int]) -> str:
    """A hash of a prompt: a saved answer continues only if the same prompt is asked again."""
    return hashlib.blake2b(np.asarray(prompt_ids, dtype=np.int64).tobytes(), digest_size=16).hexdigest()


def _oldest_and_newest(versions: Versions) -> dict[str, int | None]:
    known = [version for version, _ in versions if version is not None]
    return {"min_global_steps": min(known, default=None), "max_global_steps": max(known, default=None)}


# -- the session -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Session:
    """What a rollout has cost and been answered so far, and at which server it is."""

    uid: str
    index: int
    tokens: int = 0  # that servers have returned
    server: Any = None  # that works on it now
    request_id: str = ""  # by which that server knows it
    aborted: bool = False  # whether that server was asked to end it
    answers: list[ResumableAnswer] = field(default_factory=list)  # to its requests, in order
    asked: int = 0  # requests that its agent loop has made
    task: asyncio.Task[Any] | None = None  # while its agent loop runs

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
        self.answers[place:] = [ResumableAnswer(name)]  # a saved answer to another request is dropped
        return self.answers[place]

    def align(self, outputs: Sequence[Any]) -> None:
        """Give each output the largest log-probs of its own tokens: verl's loops keep those of the first answer."""
        if len(self.answers) == len(outputs) == 1:
            return
        found = [answer.output().extra_fields.get(TOP_LOG_PROBS) for answer in self.answers]
        values = [value for column in found if column is not None for value in column]
        rows = None if None in found else _by_token(values, [one.response_mask for one in outputs])
        for place, one in enumerate(outputs):
            one.extra_fields.pop(TOP_LOG_PROBS, None)
            if rows is not None:
                one.extra_fields[TOP_LOG_PROBS] = rows[place]

    def stop(self) -> None:
        """Cancel the agent loop where it waits, once: verl's loop then releases its tool, which may take a while."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()


def _by_token(values: Sequence[float], masks: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """Spread the values of generated tokens over rows, with 0 for other tokens; None where their numbers differ."""
    written = sum(map(sum, masks))
    if written > len(values) or (len(masks) > 1 and written < len(values)):
        return None
    left = iter(values)
    return [[next(left) if generated else 0.0 for generated in mask] for mask in masks]


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
    """The outcome of a turn: the server's answer, or the error that prevented it."""

    turn: TurnRequest
    outcome: TokenOutput | BaseException


Deliver = Callable[[list[Reply]], None]


# -- the event it ends with --------------------------------------------------------------------------------------------


def rollout_of(session: Session, outputs: list[Any], global_steps: int, truncated: bool, versions: Versions) -> Rollout:
    """The event of a session whose rows are stored; each of ``outputs``, of verl's agent loop, is a row."""
    final, uid, index = outputs[-1], session.uid, session.index
    counts = [sum(one.response_mask) for one in outputs]
    by_row = _by_row(versions, counts)
    tags = []
    for place, one in enumerate(outputs):
        own = versions if by_row is None else by_row[place]
        prompt_len, response_len = len(one.prompt_ids), len(one.response_ids)
        tag: dict[str, Any] = {  # as verl's worker tags a trajectory
            "status": "success",
            "prompt_len": prompt_len,
            "response_len": response_len,
            "seq_len": prompt_len + response_len,
            "global_steps": global_steps,
            **_oldest_and_newest(own),
        }
        if by_row is not None and tag["min_global_steps"] != tag["max_global_steps"]:
            tag[VERSIONS] = own
        tags.append(tag)
    version = min((tag["min_global_steps"] for tag in tags if tag["min_global_steps"] is not None), default=None)
    info = final.extra_fields.get("reward_extra_info") or {}
    return Rollout(
        uid,
        index,
        reward=float(final.reward_score),
        tokens=max(session.tokens, sum(counts)),  # rows may lack tokens that were generated
        metrics={name: float(value) for name, value in info.items() if is_number(value)},
        truncated=truncated,
        version=None if version is None else int(version),
        payload=[[row_key(uid, index, part), tag] for part, tag in enumerate(tags)],
        tool_tokens=sum(len(one.response_mask) for one in outputs) - sum(counts),
    )


def _by_row(versions: Versions, counts: list[int]) -> list[Versions] | None:
    """Divide the tokens that policies wrote among rows with so many tokens each; None where their numbers differ."""
    if len(counts) == 1:
        return [versions]  # a row that was cut has the first of the tokens
    if sum(counts) != sum(count for _, count in versions):
        return None
    tokens = iter([version for version, count in versions for _ in range(count)])
    rows = (itertools.groupby(itertools.islice(tokens, count)) for count in counts)
    return [[[version, len(list(written))] for version, written in row] for row in rows]
