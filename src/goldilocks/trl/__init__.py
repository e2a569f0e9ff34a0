"""The collector's decisions in TRL: dynamic sampling, adaptive rollouts and selectors for ``GRPOTrainer``.

Needs ``pip install 'goldilocks-rl[trl]'``, and neither verl nor Ray.
"""

from goldilocks.trl.trainer import GoldilocksGRPOTrainer

__all__ = ["GoldilocksGRPOTrainer"]
