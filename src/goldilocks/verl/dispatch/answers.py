"""An answer that a rollout server may give in parts, and what the requests for its parts, or of later turns, ask for.

A rollout that pauses is asked for again with what it has written behind its prompt, so an answer may have parts by
several policies. Every token keeps the log-prob and the version of the policy that wrote it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from goldilocks.types import hashed
from goldilocks.verl.dispatch.backend import ALWAYS_SEEDED, SEED_OF
from goldilocks.verl.store import Versions, oldest_and_newest

TOP_LOG_PROBS = "top_log_probs"  # the extra field with the largest log-prob at each token


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
        extra = {**last.extra_fields, **oldest_and_newest(self.versions)}
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


# -- later requests of the same rollout --------------------------------------------------------------------------------


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
    params, name = dict(sampling_params), SEED_OF.get(rollout_config.name)
    if name in params and rollout_config.name not in ALWAYS_SEEDED:
        params[name] = hashed(params[name], *parts)
    return params
