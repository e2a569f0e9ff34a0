"""Groups and rollouts as JSON values, and back. A payload must be a JSON value to be saved.

A saved group names its prompt by key and index. ``find_prompt`` finds the prompt in today's data, which may have
another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from goldilocks.core.source import KeyedPositions, Source
from goldilocks.types import Group, Prompt, Rollout

FindPrompt = Callable[[Mapping[str, Any]], Prompt]  # the prompt of a packed group


def find_prompt(source: Source, positions: KeyedPositions, packed: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a packed group; an error if the prompt is gone from the data."""
    index = positions.find_one(packed["key"], packed["index"])
    if index < 0:
        raise ValueError(
            f"group {packed['uid']} of the saved state is about a prompt (key {packed['key']}) "
            f"that is not among the {len(source)} prompts of this data set"
        )
    return source[index]


def pack_group(group: Group) -> dict[str, Any]:
    return {
        "uid": group.uid,
        "key": group.prompt.key,
        "index": group.prompt.index,
        "rollouts": [pack_rollout(rollout) for rollout in group.rollouts],
        "planned": group.planned,
        "version": group.version,
        "trained": [rollout.index for rollout in group.trained],
        "replays": group.replays,
    }


def unpack_group(packed: Mapping[str, Any], find: FindPrompt) -> Group:
    uid, chosen = packed["uid"], set(packed["trained"])
    rollouts = tuple(unpack_rollout(uid, one) for one in packed["rollouts"])
    trained = tuple(rollout for rollout in rollouts if rollout.index in chosen)
    return Group(uid, find(packed), rollouts, packed["planned"], packed["version"], trained, packed["replays"])


def pack_rollout(rollout: Rollout) -> list[Any]:
    r = rollout
    return [r.index, r.reward, r.tokens, dict(r.metrics), r.truncated, r.version, r.payload]


def unpack_rollout(uid: str, packed: list[Any]) -> Rollout:
    return Rollout(uid, *packed)
