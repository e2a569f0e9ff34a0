"""Tensor maths that verl lacks. Imports without verl; ``goldilocks.verl.algorithms`` puts it into verl's registries."""

from goldilocks.algorithms.checks import check_algorithm
from goldilocks.algorithms.pool import PoolStatistics, pool_advantages, pool_statistics
from goldilocks.algorithms.prompt_mean import prompt_mean_weights, weigh_prompts_equally

__all__ = [
    "PoolStatistics",
    "check_algorithm",
    "pool_advantages",
    "pool_statistics",
    "prompt_mean_weights",
    "weigh_prompts_equally",
]
