"""The collector's decisions in TRL: dynamic sampling, adaptive rollouts and selectors for its trainers.

Needs ``pip install 'goldilocks-rl[trl]'``, and neither verl nor Ray.
"""

from goldilocks.trl.rloo import GoldilocksRLOOTrainer
from goldilocks.trl.trainer import GoldilocksGRPOTrainer

__all__ = ["GoldilocksGRPOTrainer", "GoldilocksRLOOTrainer"]
