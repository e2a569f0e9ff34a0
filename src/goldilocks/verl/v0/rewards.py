"""A reward function handed over as an object, where verl's workers look for one by its path.

verl's reward workers load ``reward.custom_reward_function`` in processes of their own. The function travels in its
arguments, pickled by value if it cannot be imported there, so that closures and functions of a script work too.
"""

from __future__ import annotations

import base64
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from omegaconf import DictConfig, open_dict
from ray import cloudpickle
from verl import DataProto

RewardFunction = Callable[..., Any]

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
VALIDATION = "__validation__"  # in the extra_info of a validation prompt, until the function is called


def route(config: DictConfig, reward_fn: RewardFunction | None, val_reward_fn: RewardFunction | None) -> bool:
    """Make the config name these functions; returns whether there are any.

    A reward manager of verl's was built from the config, and is built from it again.
    """
    given = [function for function in (reward_fn, val_reward_fn) if function and not hasattr(function, "run_single")]
    if not given:
        return False
    for function in given:
        _check(function)
    training = reward_fn if reward_fn in given else _from_config(config)
    validation = val_reward_fn if val_reward_fn in given else training
    asynchronous = {inspect.iscoroutinefunction(function) for function in (training, validation)}
    if len(asynchronous) > 1:
        raise ValueError("reward_fn and val_reward_fn are not both plain functions: both, or both coroutine functions")
    packed = base64.b64encode(cloudpickle.dumps((training, validation))).decode()
    with open_dict(config):
        config.reward.custom_reward_function.path = f"pkg://{__name__}"
        config.reward.custom_reward_function.name = "call_async" if True in asynchronous else "call"
        config.reward.custom_reward_function.reward_kwargs = {"packed": packed}
    return True


def mark_validation(batch: DataProto) -> None:
    """Let the reward workers know these prompts, which verl does not tell them are for validation."""
    infos = batch.non_tensor_batch.get("extra_info", [{}] * len(batch))
    marked = np.empty(len(batch), dtype=object)
    marked[:] = [{**(info or {}), VALIDATION: True} for info in infos]
    batch.non_tensor_batch["extra_info"] = marked


def call(packed: str, **arguments: Any) -> Any:
    """What verl's workers call."""
    return _choose(packed, arguments)(**arguments)


async def call_async(packed: str, **arguments: Any) -> Any:
    """What verl's workers call where the function is a coroutine function."""
    return await _choose(packed, arguments)(**arguments)


def _choose(packed: str, arguments: dict[str, Any]) -> RewardFunction:
    training, validation = _unpack(packed)
    info: Mapping[str, Any] = arguments.get("extra_info") or {}
    arguments["extra_info"] = {name: value for name, value in info.items() if name != VALIDATION}
    return validation if VALIDATION in info else training


@functools.cache
def _unpack(packed: str) -> tuple[RewardFunction, RewardFunction]:
    functions: tuple[RewardFunction, RewardFunction] = cloudpickle.loads(base64.b64decode(packed))
    return functions


def _from_config(config: DictConfig) -> RewardFunction:
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    return get_custom_reward_fn(config) or default_compute_score


def _check(function: RewardFunction) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"reward_fn={name} is not accepted ({error}): a function of {', '.join(ARGUMENTS)} "
            "that returns a number, or a dict with score and other metrics"
        ) from None
