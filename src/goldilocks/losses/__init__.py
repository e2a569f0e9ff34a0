"""Tensor maths that verl lacks. Imports without verl; the plug-in registers it with verl."""

from goldilocks.losses.checks import check_algorithm
from goldilocks.losses.prompt_mean import prompt_mean_weights, weigh_prompts_equally
from goldilocks.losses.reward_pool import Untrained, pool_estimator, pooled, rows_of_rollouts, untrained_rollouts

__all__ = [
    "Untrained",
    "check_algorithm",
    "pool_estimator",
    "pooled",
    "prompt_mean_weights",
    "rows_of_rollouts",
    "untrained_rollouts",
    "weigh_prompts_equally",
]
