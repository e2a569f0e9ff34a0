"""A reward function given as an object, for verl's workers, which load one by its path.

verl's reward workers load ``reward.custom_reward_function`` in processes of their own. The function travels in its
arguments, pickled by value if it cannot be imported there, so that closures and functions of a script work too.
"""

from __future__ import annotations

import base64
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig, open_dict
from ray import cloudpickle

if TYPE_CHECKING:  # a process that only calls a function does without verl
    from verl import DataProto

RewardFunction = Callable[..., Any]

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
VALIDATION = "__validation__"  # in the extra_info of a validation prompt, until the function is called


def route(config: DictConfig, reward_fn: RewardFunction | None, val_reward_fn: RewardFunction | None) -> bool:
    """Make the config name these functions; return whether there are any.

    Of a reward manager it is the function that it scores with: verl's workers build the manager itself from the config.
    """
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    given_training, given_validation = (_function(config, given) for given in (reward_fn, val_reward_fn))
    if given_training is None and given_validation is None:
        return False
    training = given_training or get_custom_reward_fn(config) or default_compute_score
    validation = given_validation or training
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
    """Mark validation prompts for the reward workers, since verl does not."""
    infos = batch.non_tensor_batch.get("extra_info", [{}] * len(batch))
    marked = np.empty(len(batch), dtype=object)
    marked[:] = [{**(info or {}), VALIDATION: True} for info in infos]
    batch.non_tensor_batch["extra_info"] = marked


def call(packed: str, **arguments: Any) -> Any:
    """Call the function; verl's workers call this."""
    return _choose(packed, arguments)(**arguments)


async def call_async(packed: str, **arguments: Any) -> Any:
    """Call the function, if it is a coroutine function; verl's workers call this."""
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


def _function(config: DictConfig, given: Any) -> RewardFunction | None:
    """The function that was handed over, by itself or in a reward manager; None where it is the config's own."""
    function = given
    if hasattr(given, "run_single"):
        from verl.trainer.ppo.reward import resolve_reward_manager_cls

        built = resolve_reward_manager_cls(config)
        if type(given) is not built:
            raise ValueError(
                f"reward_fn={type(given).__name__} is not accepted: verl's workers build the reward manager that "
                f"reward.reward_manager names, {built.__name__}; name yours there, or hand over a function"
            )
        function = getattr(given, "compute_score", None)
        inner = function.func if isinstance(function, functools.partial) else function
        if str(getattr(inner, "__module__", "")).split(".")[0] == "verl":  # its default, or made of the config's
            return None
    if function is None:
        return None
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"reward_fn={name} is not accepted ({error}): a function of {', '.join(ARGUMENTS)} "
            "that returns a number, or a dict with score and other metrics"
        ) from None
    return function
