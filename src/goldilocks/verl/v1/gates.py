"""Judging after log-probs are known, inside the refill loop: what is rejected is replaced, not masked.

A gate is shown rows of the batch in hand and says which rollouts of which groups may not be trained. The collector is
told, judges the rest of each group again, and hands out others in the place of those it lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.runs.records import split_row_key
from goldilocks.settings import Settings
from goldilocks.verl.final_reward import REASON, KLPenalty, groups_without_variance

Rejected = dict[str, list[int]]  # the rollouts of each group that may not be trained


class Gate(Protocol):
    """One judgement of rows whose log-probs are in the queue."""

    reason: str
    refuses_flat: bool  # whether what it refuses has no gradient, and may fill up a batch that cannot be had otherwise

    def judge(self, batch: KVBatchMeta) -> tuple[Rejected, dict[str, float]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BatchFilterGate:
    """``batch_filter.*``: the two gates, the group filters and the selection of ``PPOBatchFilter``."""

    reason = "batch_filter"
    refuses_flat = False

    def __init__(self, config: PPOFilterConfig, seed: int) -> None:
        self.filter = PPOBatchFilter(config, {"seed": seed})

    def judge(self, batch: KVBatchMeta) -> tuple[Rejected, dict[str, float]]:
        data = self._tensors(batch)
        uids = [split_row_key(key)[0] for key in batch.keys]
        chosen, metrics = self.filter.filter_batch(data, uids, return_indices=True)
        kept = set(chosen.tolist())
        return rejected(key for place, key in enumerate(batch.keys) if place not in kept), metrics

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.filter.state_dict()["generator"].numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filter.load_state_dict({"generator": torch.from_numpy(state["generator"])})

    def _tensors(self, batch: KVBatchMeta) -> dict[str, torch.Tensor]:
        fields = ["rm_scores", "response_mask"]
        if self.filter.config.enable_two_gate_filter:
            fields += ["old_log_probs", "rollout_log_probs", "extra_fields"]
        stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        extra = stored.pop("extra_fields").tolist() if "extra_fields" in stored.keys() else []  # noqa: SIM118
        padded = stored.to_padded_tensor()
        data = {name: padded[name] for name in padded.keys()}  # noqa: SIM118
        data["rewards"] = data.pop("rm_scores").sum(-1)
        if extra and all("top_log_probs" in one for one in extra):
            data["top_log_probs"] = _pad([one["top_log_probs"] for one in extra], data["response_mask"])
        return data


class FinalRewardGate:
    """``filter_groups.metric=seq_final_reward``: variance of the summed token-level rewards after the KL penalty."""

    reason = REASON
    refuses_flat = True

    def __init__(self, penalty: Callable[[], KLPenalty], min_std: float) -> None:
        """``penalty`` returns that of the moment: verl may change the coefficient after each update."""
        self._penalty = penalty
        self._min_std = min_std

    def judge(self, batch: KVBatchMeta) -> tuple[Rejected, dict[str, float]]:
        fields = ["rm_scores", "response_mask", "old_log_probs", "ref_log_prob"]
        stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rewards = self._penalty().final_rewards(stored.to_padded_tensor())
        uids = [split_row_key(key)[0] for key in batch.keys]
        flat = set(groups_without_variance(uids, rewards, self._min_std))
        return rejected(key for uid, key in zip(uids, batch.keys, strict=True) if uid in flat), {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def build_gate(settings: Settings, penalty: Callable[[], KLPenalty]) -> Gate | None:
    """The gate these settings ask for, if any."""
    if settings.batch_filter_config is not None:
        return BatchFilterGate(settings.batch_filter_config, settings.seed)
    if settings.judges_final_reward:
        return FinalRewardGate(penalty, settings.filter_groups.min_std)
    return None


def rejected(keys: Any) -> Rejected:
    """Rows by group."""
    found: Rejected = defaultdict(list)
    for uid, index in map(split_row_key, keys):
        if index not in found[uid]:
            found[uid].append(index)
    return dict(found)


def _pad(rows: list[list[float]], like: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(like.shape, dtype=torch.float32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = torch.tensor(row)[: padded.shape[1]]
    return padded
