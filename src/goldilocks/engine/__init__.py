"""A rollout engine for any decoder-only transformers model: continuous batching, exact log-probs, CPU and CUDA.

``verl_server`` makes it a rollout server of verl, and ``cpu`` has what verl needs on a machine without a GPU. A driver
reads its environment from there before verl and torch are imported, so the engine itself is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from goldilocks.engine.engine import Engine, Generation, SamplingParams

__all__ = ["Engine", "Generation", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.engine"), name)
