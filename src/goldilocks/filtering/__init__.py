"""Which rows of a finished tensor batch are trained. Needs torch, except for the config; verl is not imported."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from goldilocks.filtering.config import PPOFilterConfig

if TYPE_CHECKING:
    from goldilocks.filtering.batch_filter import PPOBatchFilter, TwoGateRejectionFilter
    from goldilocks.filtering.rows import pad_batch

__all__ = ["PPOBatchFilter", "PPOFilterConfig", "TwoGateRejectionFilter", "pad_batch"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used: settings are read and checked where torch is not installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "rows" if name == "pad_batch" else "batch_filter"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
