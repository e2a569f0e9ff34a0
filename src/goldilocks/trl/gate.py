"""``batch_filter.*`` on TRL: the rows of a batch that may not be trained, judged inside the refill loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.trl.rows import LOG_PROBS, RowStore, join_rows
from goldilocks.types import Group

Rejected = dict[str, list[int]]  # the rollouts of each group that may not be trained


class BatchFilterGate:
    """The two gates, the group filters and the selection of ``PPOBatchFilter``."""

    reason = "batch_filter"

    def __init__(self, config: PPOFilterConfig, seed: int) -> None:
        self.filter = PPOBatchFilter(config, {"seed": seed})

    def judge(self, groups: Sequence[Group], store: RowStore) -> tuple[Rejected, dict[str, float]]:
        """Return the rollouts that are refused, and the filter's metrics."""
        rollouts = [rollout for group in groups for rollout in group.trained]
        if not rollouts:
            return {}, {}
        joined = join_rows([store[rollout.uid, rollout.index] for rollout in rollouts], pad_token=0, multiple=None)
        data = {
            "rewards": torch.tensor([rollout.reward for rollout in rollouts]),
            "response_mask": joined["completion_mask"],
        }
        # Both are there when vLLM generates: the gates compare what it and the trainer say of the same tokens.
        if LOG_PROBS in joined and "sampling_per_token_logps" in joined:
            data |= {"old_log_probs": joined[LOG_PROBS], "rollout_log_probs": joined["sampling_per_token_logps"]}
        uids = [rollout.uid for rollout in rollouts]
        chosen, metrics = self.filter.filter_batch(data, uids, return_indices=True)
        kept, refused = set(chosen.tolist()), defaultdict(list)
        for place, rollout in enumerate(rollouts):
            if place not in kept:
                refused[rollout.uid].append(rollout.index)
        return dict(refused), metrics

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.filter.state_dict()["generator"].numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filter.load_state_dict({"generator": torch.from_numpy(state["generator"])})
