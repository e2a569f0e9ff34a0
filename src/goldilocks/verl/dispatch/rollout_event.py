"""What the driver is told of a rollout that is stored."""

from __future__ import annotations

from typing import Any

from goldilocks.runs.records import row_key
from goldilocks.types import Rollout
from goldilocks.verl.dispatch.session import Session, Versions
from goldilocks.verl.store.behaviour import VERSIONS


def rollout_of(
    session: Session, outputs: list[Any], global_steps: int, response_length: int, versions: Versions
) -> Rollout:
    """The rollout of a session; ``outputs`` are those of verl's agent loop, each of which is a row."""
    final, uid, index = outputs[-1], session.uid, session.index
    info = final.extra_fields.get("reward_extra_info") or {}
    tags = [_tag(one, global_steps, versions) for one in outputs]
    if len(outputs) == 1 and tags[0]["min_global_steps"] != tags[0]["max_global_steps"]:
        tags[0][VERSIONS] = versions
    version = tags[-1]["min_global_steps"]
    return Rollout(
        uid,
        index,
        reward=float(final.reward_score),
        tokens=sum(sum(one.response_mask) for one in outputs),
        metrics={name: float(value) for name, value in info.items() if _is_number(value)},
        truncated=len(final.response_ids) >= response_length,
        version=None if version is None else int(version),
        payload=[[row_key(uid, index, part), tag] for part, tag in enumerate(tags)],
    )


def _tag(output: Any, global_steps: int, versions: Versions) -> dict[str, Any]:
    """The tag that verl's worker gives a trajectory, with the policies that wrote it."""
    prompt_len, response_len = len(output.prompt_ids), len(output.response_ids)
    said = [version for version, _ in versions if version is not None]
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": global_steps,
        "min_global_steps": min(said, default=None),
        "max_global_steps": max(said, default=None),
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)
