"""Tensor maths that verl lacks. Imports without verl; the plug-in registers it with verl."""

from goldilocks.algorithms.checks import check_algorithm
from goldilocks.algorithms.prompt_mean import prompt_mean_weights, weigh_prompts_equally
from goldilocks.algorithms.reward_pool import PoolStatistics, pool_advantages, pool_statistics

__all__ = [
    "PoolStatistics",
    "check_algorithm",
    "pool_advantages",
    "pool_statistics",
    "prompt_mean_weights",
    "weigh_prompts_equally",
]
