"""A reward function given as an object, for verl's workers, which load one by its path.

verl's reward workers load ``reward.custom_reward_function`` in processes of their own. The function travels in its
arguments, pickled by value if it cannot be imported there, so that closures and functions of a script work too.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from omegaconf import DictConfig, open_dict
from ray import cloudpickle

from goldilocks.config.sections import REWARDS, reward_calls
from goldilocks.errors import require

if TYPE_CHECKING:  # a process that only calls a function does without verl
    from verl import DataProto

RewardFunction = Callable[..., Any]

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
FORMS = (
    f"a function of {', '.join(ARGUMENTS)} that returns a number, or a dict with score and other metrics; or one of "
    "data, return_dict that returns a tensor, or a dict with reward_tensor and reward_extra_info"
)
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
    of_rows = {takes_rows(function) for function in (training, validation)}
    if len(of_rows) > 1:
        raise ValueError(f"reward_fn and val_reward_fn have different arguments: both {FORMS}")
    packed = base64.b64encode(cloudpickle.dumps((training, validation))).decode()
    with open_dict(config):
        config.reward.custom_reward_function.path = f"pkg://{__name__}"
        config.reward.custom_reward_function.name = "call_async" if True in asynchronous else "call"
        config.reward.custom_reward_function.reward_kwargs = {"packed": packed}
        if True in of_rows:
            accepted = f"none with reward_fn={_name(training)}: these keys are for functions of {', '.join(ARGUMENTS)}"
            require(not reward_calls(config).in_use, REWARDS, "set", accepted)
            config.reward.reward_manager.source = "importlib"
            config.reward.reward_manager.name = RowManager.__name__
            config.reward.reward_manager.module = {"path": f"pkg://{__name__}", "name": RowManager.__name__}
    return True


class RowManager:
    """A reward manager of verl's workers around one that is called with rows: it is given one row at a time."""

    def __init__(self, config: DictConfig, *_: Any, **__: Any) -> None:
        self._packed = config.reward.custom_reward_function.reward_kwargs.packed

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Return the score of the last row, which is the rollout's, and what else was returned of it."""
        row = data[-1:]
        arguments = {"extra_info": row.non_tensor_batch.get("extra_info", [None])[0]}
        manager = _choose(self._packed, arguments)
        row.non_tensor_batch["extra_info"] = np.array([arguments["extra_info"]], dtype=object)
        result = await asyncio.get_running_loop().run_in_executor(None, lambda: manager(row, return_dict=True))
        if not isinstance(result, Mapping):
            result = {"reward_tensor": result}
        score = float(result["reward_tensor"].sum())
        extra = {name: values[0] for name, values in (result.get("reward_extra_info") or {}).items()}
        return {"reward_score": score, "reward_extra_info": extra or {"acc": score}}  # as verl's of a plain number

    @classmethod
    def assemble_rm_scores(cls, data: DataProto, scores: list[float]) -> Any:
        """Return verl's tensor of scores, which has each at the last token of its response."""
        from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

        return RewardManagerBase.assemble_rm_scores(data, scores)


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
    return cloudpickle.loads(base64.b64decode(packed))


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
    known = _binds(function, **dict.fromkeys(ARGUMENTS)) or takes_rows(function)
    require(known, "reward_fn", _name(function), FORMS)
    return cast("RewardFunction", function)


def takes_rows(function: Any) -> bool:
    """Whether a function is called with rows, as ``(data, return_dict)``, and not with one answer's arguments."""
    return not _binds(function, **dict.fromkeys(ARGUMENTS)) and _binds(function, None, return_dict=True)


def _binds(function: Any, *args: Any, **arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **arguments)
    except (TypeError, ValueError):
        return False
    return True


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
