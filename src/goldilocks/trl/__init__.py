"""The collector's decisions in TRL: dynamic sampling, adaptive rollouts and selectors for its trainers.

Needs the extra ``trl``, and neither verl nor Ray.
"""

from typing import Any

from goldilocks.trl.algorithms import GoldilocksGRPOTrainer, GoldilocksRLOOTrainer

__all__ = ["GoldilocksAsyncGRPOTrainer", "GoldilocksGRPOTrainer", "GoldilocksRLOOTrainer"]


def __getattr__(name: str) -> Any:
    """Import the asynchronous trainer when it is asked for: it is experimental, and not every TRL has it."""
    if name != "GoldilocksAsyncGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from goldilocks.trl.async_trainer import GoldilocksAsyncGRPOTrainer
    except ImportError as error:
        from trl import __version__

        raise ImportError(f"{name} works with TRL 1.16, and this is TRL {__version__}: {error}") from error
    return GoldilocksAsyncGRPOTrainer
