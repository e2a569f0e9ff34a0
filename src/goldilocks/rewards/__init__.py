"""Reward functions, called as ``goldilocks.rewards`` says. ``judge`` makes one for TRL's trainers."""

from goldilocks.rewards.calls import TIMEOUT_S, RewardCosts, RewardFailed, RewardTimeout, is_number, judge, spent

__all__ = ["TIMEOUT_S", "RewardCosts", "RewardFailed", "RewardTimeout", "is_number", "judge", "spent"]
