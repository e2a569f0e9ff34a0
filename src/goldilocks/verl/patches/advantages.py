"""GRPO's advantages, group by group where verl goes row by row."""

from __future__ import annotations

import functools
from typing import Any

from goldilocks.verl.patches.patch import Function, Kind, Patch


def grpo_by_group(original: Function) -> Function:
    """Each group's mean and deviation are verl's to the bit; what is done with them is done for all rows at once."""

    @functools.wraps(original)
    def compute_grpo_outcome_advantage(
        token_level_rewards: Any,
        response_mask: Any,
        index: Any,
        epsilon: float = 1e-6,
        norm_adv_by_std_in_grpo: bool = True,
        config: Any = None,
    ) -> Any:
        import torch

        groups: dict[Any, list[int]] = {}
        for place, group in enumerate(index):
            groups.setdefault(group, []).append(place)
        with torch.no_grad():
            scores = token_level_rewards.sum(dim=-1)
            mean, deviation = torch.zeros_like(scores), torch.ones_like(scores)
            for places in groups.values():
                if len(places) > 1:
                    part = scores[places]
                    mean[places], deviation[places] = part.mean(), part.std()
            scores = (scores - mean) / (deviation + epsilon) if norm_adv_by_std_in_grpo else scores - mean
            scores = scores.unsqueeze(-1) * response_mask
        return scores, scores

    return compute_grpo_outcome_advantage


GRPO_ADVANTAGES = Patch(
    "grpo-advantages",
    Kind.SPEED,
    "verl.trainer.ppo.core_algos",
    {"compute_grpo_outcome_advantage": grpo_by_group},
    {"compute_grpo_outcome_advantage": "1ae54c999b7df21e"},
    "verl computes with a tensor of one number for every row; a group's rows are computed at once",
    "nothing: the same values",
    "CPU +1 % (-1 to +2)",
    "verl computes a group's rows at once",
)
