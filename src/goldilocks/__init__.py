"""Goldilocks: spend rollouts where they teach."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from goldilocks.errors import missing_extra

if TYPE_CHECKING:  # imported on first use: many processes of a run need none of it, and NumPy neither
    from goldilocks.core import Accounts, Beliefs, Collector, Exhausted, Limits, ListSource, Source, Surplus
    from goldilocks.types import Failure, Group, Prompt, Request, Rollout, Verdict

__version__ = "0.2.0.dev0"

_CONFIGS = (
    "ActorConfig", "ActorRolloutRefConfig", "AlgoConfig", "DataConfig", "FilterGroupsConfig", "PPOTrainerConfig",
    "RolloutConfig", "TrainerConfig",
)  # fmt: skip
# Names whose modules need torch or verl: imported on first use, so that the core stays light.
_LAZY = {
    "PPOBatchFilter": "goldilocks.filtering",
    "PPOFilterConfig": "goldilocks.filtering",
    "RayPPOTrainerWithSampling": "goldilocks.verl.v0.trainer",
    **dict.fromkeys(_CONFIGS, "goldilocks.verl.v0.python_config"),
}
_EXTRAS = {"filtering": "filter", "verl": "verl"}

__all__ = [
    "Accounts",
    "Beliefs",
    "Collector",
    "Exhausted",
    "Failure",
    "Group",
    "Limits",
    "ListSource",
    "Prompt",
    "Request",
    "Rollout",
    "Source",
    "Surplus",
    "Verdict",
    *_LAZY,
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            extra = _EXTRAS[_LAZY[name].split(".")[1]]
            raise ModuleNotFoundError(missing_extra(error, extra), name=error.name) from error
    if name in ("core", "types"):
        return importlib.import_module(f"goldilocks.{name}")
    if name in __all__:
        from goldilocks import core, types

        return getattr(core if hasattr(core, name) else types, name)
    raise AttributeError(f"module 'goldilocks' has no attribute {name!r}")
