"""Groups and visits as JSON values, and back. A payload is stored as it is: to be saved it must be a JSON value too."""

from __future__ import annotations

from typing import Any

from goldilocks.core.visit import Visit
from goldilocks.types import Group, Prompt, Rollout


def pack_visit(visit: Visit) -> dict[str, Any]:
    """An open group, whole."""
    return {
        "uid": visit.uid,
        "key": visit.prompt.key,
        "index": visit.prompt.index,
        "planned": visit.planned,
        "version": visit.version,
        "number": visit.number,
        "rollouts": [_pack_rollout(rollout) for rollout in visit.rollouts],
        "settled": visit.settled,
        "ahead": [[index, None if one is None else _pack_rollout(one)] for index, one in visit.ahead.items()],
        "in_flight": sorted(visit.in_flight),
        "unsent": list(visit.unsent),
        "asks": visit.asks,
        "failures": visit.failures,
    }


def unpack_visit(packed: dict[str, Any], prompt: Prompt) -> Visit:
    """The visit, to a prompt that may stand elsewhere now."""
    uid = packed["uid"]
    return Visit(
        uid,
        prompt,
        packed["planned"],
        packed["version"],
        number=packed.get("number", 0),
        rollouts=[_unpack_rollout(uid, one) for one in packed["rollouts"]],
        settled=packed["settled"],
        ahead={index: None if one is None else _unpack_rollout(uid, one) for index, one in packed["ahead"]},
        in_flight=set(packed["in_flight"]),
        unsent=list(packed["unsent"]),
        asks=packed["asks"],
        failures=packed["failures"],
    )


def pack_group(group: Group) -> dict[str, Any]:
    """A judged group, whole."""
    return {
        "uid": group.uid,
        "key": group.prompt.key,
        "index": group.prompt.index,
        "rollouts": [_pack_rollout(rollout) for rollout in group.rollouts],
        "planned": group.planned,
        "version": group.version,
        "trained": [rollout.index for rollout in group.trained],
        "replays": group.replays,
    }


def unpack_group(packed: dict[str, Any], prompt: Prompt) -> Group:
    """The group, of a prompt that may stand elsewhere now."""
    uid, chosen = packed["uid"], set(packed["trained"])
    rollouts = tuple(_unpack_rollout(uid, one) for one in packed["rollouts"])
    trained = tuple(rollout for rollout in rollouts if rollout.index in chosen)
    return Group(uid, prompt, rollouts, packed["planned"], packed["version"], trained, packed["replays"])


def _pack_rollout(rollout: Rollout) -> list[Any]:
    r = rollout
    return [r.index, r.reward, r.tokens, dict(r.metrics), r.truncated, r.version, r.payload]


def _unpack_rollout(uid: str, packed: list[Any]) -> Rollout:
    index, reward, tokens, metrics, truncated, version, payload = packed
    return Rollout(uid, index, reward, tokens, metrics, truncated, version, payload)
