"""Judging after log-probs are known, inside the refill loop: what is rejected is replaced, not masked.

A gate is shown rows of the batch in hand and says which rollouts of which groups may not be trained. The collector is
told, judges the rest of each group again, and hands out others in the place of those it lost.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.settings import Settings
from goldilocks.types import mean_and_std

Rejected = dict[str, list[int]]  # the rollouts of each group that may not be trained


class Gate(Protocol):
    """One judgement of rows whose log-probs are in the queue."""

    reason: str

    def judge(self, batch: KVBatchMeta) -> tuple[Rejected, dict[str, float]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BatchFilterGate:
    """``batch_filter.*``: the two gates, the group filters and the selection of ``PPOBatchFilter``."""

    reason = "batch_filter"

    def __init__(self, config: PPOFilterConfig, seed: int) -> None:
        self.filter = PPOBatchFilter(config, {"seed": seed})

    def judge(self, batch: KVBatchMeta) -> tuple[Rejected, dict[str, float]]:
        data = self._tensors(batch)
        uids = [split_key(key)[0] for key in batch.keys]
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

    reason = "no_variance_after_kl"

    def __init__(self, kl_coefficient: Any, kl_penalty: str, min_std: float) -> None:
        self._kl_coefficient = kl_coefficient
        self._kl_penalty = kl_penalty
        self._min_std = min_std

    def judge(self, batch: KVBatchMeta) -> tuple[Rejected, dict[str, float]]:
        from verl.trainer.ppo.core_algos import kl_penalty

        fields = ["rm_scores", "response_mask", "old_log_probs", "ref_log_prob"]
        stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        data = stored.to_padded_tensor()
        kl = kl_penalty(data["old_log_probs"], data["ref_log_prob"], kl_penalty=self._kl_penalty)
        rewards = data["rm_scores"] - self._kl_coefficient() * kl * data["response_mask"]
        totals: dict[str, list[float]] = defaultdict(list)
        for key, total in zip(batch.keys, rewards.sum(-1).tolist(), strict=True):
            totals[split_key(key)[0]].append(total)
        flat = {uid for uid, values in totals.items() if len(values) > 1 and mean_and_std(values)[1] <= self._min_std}
        return rejected(key for key in batch.keys if split_key(key)[0] in flat), {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def build_gate(settings: Settings, kl_coefficient: Any, kl_penalty: str) -> Gate | None:
    """The gate these settings ask for, if any."""
    if settings.batch_filter_config is not None:
        return BatchFilterGate(settings.batch_filter_config, settings.seed)
    if settings.judges_final_reward:
        return FinalRewardGate(kl_coefficient, kl_penalty, settings.filter_groups.min_std)
    return None


def split_key(key: str) -> tuple[str, int]:
    """The group and the rollout that a row belongs to: keys are ``{uid}_{rollout}_{part}``."""
    uid, rollout, _ = key.rsplit("_", 2)
    return uid, int(rollout)


def rejected(keys: Any) -> Rejected:
    """Rows by group."""
    found: Rejected = defaultdict(list)
    for uid, index in map(split_key, keys):
        if index not in found[uid]:
            found[uid].append(index)
    return dict(found)


def _pad(rows: list[list[float]], like: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(like.shape, dtype=torch.float32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = torch.tensor(row)[: padded.shape[1]]
    return padded
