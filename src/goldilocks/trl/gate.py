"""``batch_filter.*`` on TRL: the rows of a batch that may not be trained, judged inside the refill loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.trl.rows import LOG_PROBS, RowStore, join_rows
from goldilocks.types import Group, Rollout

Rollouts = dict[str, list[int]]  # of each group, by their indices


class BatchFilterGate:
    """The two gates, the group filters and the selection of ``PPOBatchFilter``."""

    reason = "batch_filter"

    def __init__(self, config: PPOFilterConfig, seed: int) -> None:
        self.filter = PPOBatchFilter(config, {"seed": seed})

    def judge(self, groups: Sequence[Group], store: RowStore) -> tuple[Rollouts, Rollouts, dict[str, float]]:
        """Return the rollouts that are refused, those that are only cut, and the filter's metrics."""
        rollouts = [rollout for group in groups for rollout in group.trained]
        if not rollouts:
            return {}, {}, {}
        joined = join_rows([store[rollout.uid, rollout.index] for rollout in rollouts], pad_token=0, multiple=None)
        data = {
            "rewards": torch.tensor([rollout.reward for rollout in rollouts]),
            "response_mask": joined["completion_mask"],
        }
        # Both are there when vLLM generates: the gates compare what it and the trainer say of the same tokens.
        if LOG_PROBS in joined and "sampling_per_token_logps" in joined:
            data |= {"old_log_probs": joined[LOG_PROBS], "rollout_log_probs": joined["sampling_per_token_logps"]}
        uids = [rollout.uid for rollout in rollouts]
        chosen, cut, metrics = self.filter.select(data, uids)
        staying = {*chosen.tolist(), *cut.tolist()}
        refused = by_group(one for place, one in enumerate(rollouts) if place not in staying)
        return refused, by_group(rollouts[place] for place in cut.tolist()), metrics

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.filter.state_dict()["generator"].numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filter.load_state_dict({"generator": torch.from_numpy(state["generator"])})


def by_group(rollouts: Iterable[Rollout]) -> Rollouts:
    """The indices of the rollouts of each group."""
    found: Rollouts = defaultdict(list)
    for rollout in rollouts:
        found[rollout.uid].append(rollout.index)
    return dict(found)
