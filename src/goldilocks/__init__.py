"""Goldilocks: spend rollouts where they teach."""

from __future__ import annotations

import importlib
from typing import Any

from goldilocks.core import Accounts, Beliefs, Collector, Exhausted, Ledger, Limits, ListSource, Source, Surplus
from goldilocks.errors import missing_extra
from goldilocks.types import Failure, Group, Prompt, Request, Rollout, Verdict

__version__ = "0.1.0"

# Names whose modules need torch or verl: imported when they are first used, so that the core stays light.
_LAZY = {
    "PPOBatchFilter": "goldilocks.filtering",
    "PPOFilterConfig": "goldilocks.filtering",
    "ActorConfig": "goldilocks.verl.compat.python_config",
    "ActorRolloutRefConfig": "goldilocks.verl.compat.python_config",
    "AlgoConfig": "goldilocks.verl.compat.python_config",
    "DataConfig": "goldilocks.verl.compat.python_config",
    "FilterGroupsConfig": "goldilocks.verl.compat.python_config",
    "PPOTrainerConfig": "goldilocks.verl.compat.python_config",
    "RolloutConfig": "goldilocks.verl.compat.python_config",
    "TrainerConfig": "goldilocks.verl.compat.python_config",
    "RayPPOTrainerWithSampling": "goldilocks.verl.compat.trainer",
}

_EXTRAS = {"filtering": "filter", "verl": "verl"}

__all__ = [
    "Accounts",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgoConfig",
    "Beliefs",
    "Collector",
    "DataConfig",
    "Exhausted",
    "Failure",
    "FilterGroupsConfig",
    "Group",
    "Ledger",
    "Limits",
    "ListSource",
    "PPOBatchFilter",
    "PPOFilterConfig",
    "PPOTrainerConfig",
    "Prompt",
    "RayPPOTrainerWithSampling",
    "Request",
    "Rollout",
    "RolloutConfig",
    "Source",
    "Surplus",
    "TrainerConfig",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            extra = _EXTRAS[_LAZY[name].split(".")[1]]
            raise ModuleNotFoundError(missing_extra(error, extra), name=error.name) from error
    raise AttributeError(f"module 'goldilocks' has no attribute {name!r}")
