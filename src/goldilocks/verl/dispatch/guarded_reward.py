"""verl's reward function under a time limit, and called as ``goldilocks.rewards`` says where that section is set.

verl loads ``reward.custom_reward_function`` by its path in every process that grades. Here the path leads to this
module, and the user's own functions travel in its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from goldilocks.config.settings import reward_calls
from goldilocks.errors import require
from goldilocks.rewards import AT_ONCE, TIMEOUT_S, LimitedReward, RewardCaller, RewardCalls
from goldilocks.rewards.calls import Part
from goldilocks.rewards.limited import Function, Room

VERLS_OWN = {"path": "pkg://verl.utils.reward_score", "name": "default_compute_score"}  # where the config names none


def guard(config: DictConfig, timeout_s: float = TIMEOUT_S, workers: int | None = None) -> None:
    """Put the reward function of a config under a time limit, and under ``goldilocks.rewards`` where that is set.

    ``workers`` is how many processes grade at the same time; None: as many as verl has for it.
    """
    reward: Any = OmegaConf.to_container(config.reward.custom_reward_function, resolve=True)
    calls = reward_calls(config)
    if is_guarded(reward) or not (reward["path"] or calls.in_use):
        return
    with open_dict(config):
        own = reward if reward["path"] else VERLS_OWN
        ours = called(own, calls, workers or _workers(config), timeout_s) if calls.in_use else guarded(own, timeout_s)
        config.reward.custom_reward_function = ours


def guard_if_asked(config: DictConfig) -> None:
    """The same on verl's own command line, where nothing limits a function unless ``goldilocks.rewards`` is set."""
    if reward_calls(config).in_use:
        guard(config)


def guarded(reward: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """verl's ``reward.custom_reward_function``, wrapped: the same keys, for the same function under a time limit."""
    return _ours(compute_score, {"guarded_function": _named(reward), "timeout_s": timeout_s})


def called(
    reward: Mapping[str, Any], calls: RewardCalls, workers: int = 1, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """The same, called as the section says; each of the workers has its share of the calls at a time."""
    if calls.concurrency is not None:
        key, accepted = "goldilocks.rewards.concurrency", f"{workers} or more, one for each worker that grades"
        require(calls.concurrency >= workers, key, calls.concurrency, accepted)
        calls = replace(calls, concurrency=calls.concurrency // workers)
    given = {name: (_named(asdict(one)) if one.path else _named(reward)) for name, one in calls.weighted.items()}
    functions = given or {str(reward["name"]): _named(reward)}
    return _ours(compute_reward, {"functions": functions, "calls": asdict(calls), "timeout_s": timeout_s})


def is_guarded(reward: Mapping[str, Any]) -> bool:
    """Whether ``reward.custom_reward_function`` was wrapped here."""
    return bool(reward["path"] == f"pkg://{__name__}")


async def compute_score(*, guarded_function: Mapping[str, Any], timeout_s: float, **arguments: Any) -> Any:
    """Call the function under the time limit; this is what verl sees."""
    function = _once(guarded_function, _function)
    return await function.within(timeout_s, arguments, await _room.enter(function.name, timeout_s))


async def compute_reward(
    *, functions: Mapping[str, Any], calls: Mapping[str, Any], timeout_s: float, **arguments: Any
) -> Any:
    """Call the functions as the section says; this is what verl sees where ``goldilocks.rewards`` is set."""
    return await _once(functions, lambda _: _caller(functions, calls, timeout_s))(**arguments)


_room = Room(AT_ONCE)


def _ours(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"path": f"pkg://{__name__}", "name": function.__name__, "reward_kwargs": arguments}


def _named(reward: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(reward.get("reward_kwargs") or {})
    return {"path": reward["path"], "name": reward["name"], "reward_kwargs": arguments}


def _workers(config: DictConfig) -> int:
    """The processes that may grade at the same time: verl's agent loops, or its reward workers."""
    return max(config.actor_rollout_ref.rollout.agent.num_workers, config.reward.num_workers)


_made: dict[int, tuple[Any, Any]] = {}


def _once(config: Any, make: Any) -> Any:
    """Make something of a config once. The config is the same object at every call, and reading it takes long."""
    if id(config) not in _made:
        _made[id(config)] = config, make(config)  # the config is kept, so that no other object gets its id
    return _made[id(config)][1]


def _function(config: Mapping[str, Any]) -> LimitedReward:
    path, name = config["path"], config["name"]
    return LimitedReward.of(_load(path, name), f"{name} of {path}", **config["reward_kwargs"])


def _caller(functions: Mapping[str, Any], calls: Mapping[str, Any], timeout_s: float) -> RewardCaller:
    plain: Any = OmegaConf.to_container(OmegaConf.create(dict(calls)), resolve=True)
    read = RewardCalls(**plain)
    weights = {name: one.weight for name, one in read.weighted.items()}
    parts = {name: Part(_function(one), weights.get(name, 1.0)) for name, one in functions.items()}
    return RewardCaller(parts, read, timeout_s)


@cache
def _load(path: str, name: str) -> Function:
    from verl.utils.import_utils import load_extern_object

    function: Any = load_extern_object(module_path=path, object_name=name)
    return function
