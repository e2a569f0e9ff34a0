"""The gates of verl's V0 trainer, over rows at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("verl")

from goldilocks.filtering import PPOFilterConfig
from goldilocks.types import Group, Prompt, Rollout
from goldilocks.verl.v0.backend import BatchFilter, ProtoRows, Row

MASK = torch.ones(4, dtype=torch.long)
GATES = PPOFilterConfig(target_group_size=3, enable_two_gate_filter=True, gate_always=True)


def test_a_row_is_refused_by_its_own_log_probs_in_whatever_order_an_allocator_trains_a_group() -> None:
    rows = ProtoRows()
    for index in range(4):
        written = torch.full((4,), -1.0 if index else -0.1)  # only the first differs from the policy
        scores = torch.tensor([0.0, 0.0, 0.0, float(index % 2)])
        rows.put(("g0", index), Row({"rm_scores": scores, "response_mask": MASK, "rollout_log_probs": written}, {}))
    rollouts = tuple(Rollout("g0", index, float(index % 2), 4, version=1) for index in range(4))
    group = Group("g0", Prompt("a", 0), rollouts, version=1)
    for trained in (rollouts, rollouts[::-1]):
        gate = BatchFilter(
            GATES,
            seed=1,
            of_batch=lambda groups: rows.of_batch(groups, 1),
            with_log_probs=lambda batch, reference: {"old_log_probs": torch.full((len(batch), 4), -1.0)},
        )
        assert gate.judge([replace(group, trained=trained)]).refused == {"g0": [0]}
