"""The gates of verl's V0 trainer, over rows at hand; what a rollout says of the row that verl generated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from verl import DataProto

from goldilocks.filtering import PPOFilterConfig
from goldilocks.types import Group, Prompt, Rollout
from goldilocks.verl.v0.backend import BatchFilter, GenerationBatches, ProtoRow, ProtoRows

MASK = torch.ones(4, dtype=torch.long)
GATES = PPOFilterConfig(target_group_size=3, enable_two_gate_filter=True, gate_always=True)


def test_a_row_is_refused_by_its_own_log_probs_in_whatever_order_an_allocator_trains_a_group() -> None:
    rows = ProtoRows()
    for index in range(4):
        written = torch.full((4,), -1.0 if index else -0.1)  # only the first differs from the policy
        scores = torch.tensor([0.0, 0.0, 0.0, float(index % 2)])
        rows.put(
            ("g0", index), ProtoRow({"rm_scores": scores, "response_mask": MASK, "rollout_log_probs": written}, {})
        )
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


def test_a_response_is_truncated_unless_its_last_allowed_token_ends_it() -> None:
    responses = torch.tensor([[5, 5, 5, 5], [5, 5, 5, 1], [5, 1, 0, 0]])
    mask = (responses > 0).long()
    tensors = {"responses": responses, "response_mask": mask, "attention_mask": mask, "rm_scores": mask.float()}
    output = DataProto.from_dict(tensors, non_tensors={"acc": np.ones(3)}, meta_info={"reward_extra_keys": ["acc"]})
    nothing: Any = None
    found = GenerationBatches(nothing, nothing, nothing, nothing, nothing, ends=[1])._answers(output)
    assert [(said["tokens"], said["truncated"]) for _, said in found] == [(4, True), (4, False), (2, False)]
