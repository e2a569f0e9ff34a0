"""Groups and rollouts as JSON values, and back. A payload must be a JSON value to be saved."""

from __future__ import annotations

from typing import Any

from goldilocks.types import Group, Prompt, Rollout


def pack_group(group: Group) -> dict[str, Any]:
    """A judged group, whole."""
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


def unpack_group(packed: dict[str, Any], prompt: Prompt) -> Group:
    """The group, of a prompt that may stand elsewhere now."""
    uid, chosen = packed["uid"], set(packed["trained"])
    rollouts = tuple(unpack_rollout(uid, one) for one in packed["rollouts"])
    trained = tuple(rollout for rollout in rollouts if rollout.index in chosen)
    return Group(uid, prompt, rollouts, packed["planned"], packed["version"], trained, packed["replays"])


def pack_rollout(rollout: Rollout) -> list[Any]:
    r = rollout
    return [r.index, r.reward, r.tokens, dict(r.metrics), r.truncated, r.version, r.payload]


def unpack_rollout(uid: str, packed: list[Any]) -> Rollout:
    index, reward, tokens, metrics, truncated, version, payload = packed
    return Rollout(uid, index, reward, tokens, metrics, truncated, version, payload)
