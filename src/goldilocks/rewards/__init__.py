"""Calls of reward functions: a time limit, several at a time, another try for those that fail, several as one reward.

``judge`` makes a reward function for TRL of one that grades a single answer. Under verl ``goldilocks.rewards`` is read.
"""

from goldilocks.rewards.calls import OnFailure, RewardCaller, RewardCalls, RewardFailed, WeightedReward, judge, spent
from goldilocks.rewards.limited import AT_ONCE, TIMEOUT_S, LimitedReward, RewardTimeout

__all__ = [
    "AT_ONCE",
    "TIMEOUT_S",
    "LimitedReward",
    "OnFailure",
    "RewardCaller",
    "RewardCalls",
    "RewardFailed",
    "RewardTimeout",
    "WeightedReward",
    "judge",
    "spent",
]
