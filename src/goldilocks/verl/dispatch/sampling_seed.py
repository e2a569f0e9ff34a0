"""The seed of a rollout's noise: a function of the run's seed, the prompt, the visit and the index.

Two runs with one seed draw the same noise for the same rollout, whatever else is generated, in any order, at any
server. Every validation has the same visit, and so the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goldilocks.hashing import hashed

RunSeeds = tuple[object, object]  # of the data and of the rollouts

VALIDATION = -1  # the visit of every validation

# The name of the seed in each engine's sampling parameters. Engines other than ours sample more slowly with a seed in
# each request, so they get one only with `rollout.full_determinism`.
_PARAMETER = {"transformers": "seed", "vllm": "seed", "sglang": "sampling_seed"}
_ALWAYS = ("transformers",)


def run_seeds(config: Any) -> RunSeeds:
    """The seeds of the run, of verl's config: read once, since a config takes longer to read than a seed to make."""
    return config.data.get("seed"), config.actor_rollout_ref.rollout.seed


def visit_seed(seeds: RunSeeds, key: int, place: object, visit: int) -> int:
    """The seed of one visit to a prompt.

    ``place`` is the prompt's place in the data: copies of a prompt get different answers.
    """
    return hashed(*seeds, key, place, visit)


def seeded(sampling_params: Mapping[str, Any], rollout_config: Any, visit: int, index: int) -> dict[str, Any]:
    """The sampling parameters of rollout ``index`` of a visit with the seed ``visit``."""
    name = _PARAMETER.get(rollout_config.name)
    if name is None or not (rollout_config.name in _ALWAYS or rollout_config.full_determinism):
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
    """Our engine draws by the seed and the position in the whole text, so a later request goes on with the noise.

    Other engines draw by the seed and the position in the request: the same seed would repeat the noise.
    """
    params, name = dict(sampling_params), _PARAMETER.get(rollout_config.name)
    if name in params and rollout_config.name not in _ALWAYS:
        params[name] = hashed(params[name], *parts)
    return params


def request_number(row: Mapping[str, Any]) -> int:
    """A number for each rollout: with ``full_determinism`` verl names requests by priority, which it has all alike."""
    return hashed(row["uid"], row["session_id"])
