"""``batch_filter.*`` on TRL: the rows of a batch that may not be trained, judged inside the refill loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from goldilocks.drive.filter_gate import FilterGate
from goldilocks.drive.gate import Judgement
from goldilocks.filtering import PPOFilterConfig
from goldilocks.trl.rows import LOG_PROBS, SAMPLED, CompletionRows, join_rows
from goldilocks.types import Group


class CompletionGate(FilterGate):
    """``batch_filter.*`` on the rows that TRL returned."""

    def __init__(self, config: PPOFilterConfig, seed: int, rows: CompletionRows) -> None:
        super().__init__(config, seed)
        self._rows = rows

    def judge(self, groups: Sequence[Group]) -> Judgement:
        rollouts = [rollout for group in groups for rollout in group.trained]
        places = [(rollout.uid, rollout.index) for rollout in rollouts]
        joined = join_rows(self._rows.get(places), pad_token=0, multiple=None)
        mask = joined["completion_mask"]
        data = {
            "rewards": torch.tensor([rollout.reward for rollout in rollouts]),
            "response_mask": mask * joined["tool_mask"] if "tool_mask" in joined else mask,
        }
        # Both are there when vLLM generates: the gates compare what it and the trainer say of the same tokens.
        if LOG_PROBS in joined and SAMPLED in joined:
            data |= {"old_log_probs": joined[LOG_PROBS], "rollout_log_probs": joined[SAMPLED]}
        return self.judge_rows(places, data)
