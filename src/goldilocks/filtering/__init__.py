"""Which rows of a finished tensor batch are trained. Needs torch, except for the config; verl is not imported."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from goldilocks.filtering.config import PPOFilterConfig

if TYPE_CHECKING:
    from goldilocks.filtering.batch_filter import PPOBatchFilter, TwoGateRejectionFilter
    from goldilocks.filtering.rows import pad_batch

__all__ = ["PPOBatchFilter", "PPOFilterConfig", "TwoGateRejectionFilter", "pad_batch"]

# Imported when they are first used: settings are read and checked where torch is not installed.
_NEED_TORCH = {
    "PPOBatchFilter": "goldilocks.filtering.batch_filter",
    "TwoGateRejectionFilter": "goldilocks.filtering.batch_filter",
    "pad_batch": "goldilocks.filtering.rows",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'goldilocks.filtering' has no attribute {name!r}")
