"""The seed of a rollout's noise: a function of the run's seed, the prompt, the visit and the index, and nothing else.

Two runs with one seed draw the same noise for the same rollout, whatever else is being generated, in which order
requests arrive, and at which server. Validation has one visit that never counts on: it draws the same noise each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goldilocks.hashing import hashed

VALIDATION = -1  # the visit of every validation

# How an engine is told. Ours always is. The others sample more slowly with a seed in each request, so they are told
# only where `rollout.full_determinism` asks for it.
_PARAMETER = {"transformers": "seed", "vllm": "seed", "sglang": "sampling_seed"}
_ALWAYS = ("transformers",)


def visit_seed(config: Any, key: int, place: object, visit: int) -> int:
    """Of one visit to a prompt; ``config`` is verl's, whose seeds are the run's.

    ``place`` is where the prompt stands in the data: a prompt that is there twice does not get the same answers twice.
    """
    return hashed(config.data.get("seed"), config.actor_rollout_ref.rollout.seed, key, place, visit)


def seeded(sampling_params: Mapping[str, Any], rollout_config: Any, visit: int, index: int) -> dict[str, Any]:
    """The sampling parameters of rollout ``index`` of a visit with the seed ``visit``."""
    name = _PARAMETER.get(rollout_config.name)
    if name is None or not (rollout_config.name in _ALWAYS or rollout_config.full_determinism):
        return dict(sampling_params)
    return {**sampling_params, name: hashed(visit, index)}


def continued(sampling_params: Mapping[str, Any], rollout_config: Any, written: int) -> dict[str, Any]:
    """The sampling parameters of the rest of an answer of which ``written`` tokens are there.

    Our engine draws by the seed and the position in the whole text, so that the rest is what it would have been. The
    others draw by the seed and the position in the request: with the same seed the noise would repeat itself.
    """
    params = dict(sampling_params)
    if not written:
        return params
    limit = params.pop("max_new_tokens", rollout_config.response_length)
    params["max_tokens"] = params.get("max_tokens", limit) - written
    name = _PARAMETER.get(rollout_config.name)
    if name in params and rollout_config.name not in _ALWAYS:
        params[name] = hashed(params[name], written)
    return params


def request_number(row: Mapping[str, Any]) -> int:
    """A rollout's own number, where verl would name every request alike: with ``full_determinism`` by its priority."""
    return hashed(row["uid"], row["session_id"])
