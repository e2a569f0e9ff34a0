"""Batches of several updates on TRL: the ratio is against the policy that wrote a token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")

import trl_world as world

from goldilocks.trl import GoldilocksGRPOTrainer
from goldilocks.trl.rows import LOG_PROBS

Tokens = tuple[int, ...]


class Watching(GoldilocksGRPOTrainer):
    """Notes, outside of TRL's and our code, what wrote each answer and what each loss compares it with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.written: dict[tuple[Tokens, Tokens], tuple[int, Tensor]] = {}  # the update and its policy's log-probs
        self.compared: list[tuple[int, int, float]] = []  # update of the loss, update that wrote, largest difference
        super().__init__(*args, **kwargs)

    def _generate_round(self, inputs: Any, *args: Any) -> Any:
        made = super()._generate_round(inputs, *args)
        for row in made[1]:
            key = tokens(row.tensors["prompt_ids"]), tokens(row.tensors["completion_ids"])
            self.written[key] = self.state.global_step, self.policy_now(row.tensors)
        return made

    @torch.no_grad()
    def policy_now(self, row: Any) -> Tensor:
        """Log-probs of the completion, by a plain forward pass."""
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        logits = self.model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        for place, advantage in enumerate(inputs["advantages"]):
            prompt = inputs["prompt_ids"][place][inputs["prompt_mask"][place].bool()]
            completion = inputs["completion_ids"][place][inputs["completion_mask"][place].bool()]
            if len(completion) and bool((advantage != 0).any()):
                wrote, expected = self.written[tokens(prompt), tokens(completion)]
                now = self.state.global_step
                if LOG_PROBS in inputs:
                    used = inputs[LOG_PROBS][place, : len(completion)]
                    self.compared.append((now, wrote, float((used - expected).abs().max())))
                else:  # TRL compares with the policy of now
                    self.compared.append((now, wrote, 0.0 if now == wrote else math.inf))
        return loss


def tokens(ids: Tensor) -> Tokens:
    return tuple(ids.tolist())


def watched(out: Path, sections: dict[str, Any], **chosen: Any) -> Watching:
    made: Any = world.trainer(out, ours=Watching, sections=sections, **chosen)
    made.train()
    return made


@pytest.mark.parametrize(("accumulation", "only_signal"), [(1, False), (2, True)])
def test_later_mini_batches_and_epochs_compare_with_the_policy_that_wrote_the_token(
    tmp_path: Path, accumulation: int, only_signal: bool
) -> None:
    """Two epochs over four parts of a batch; each part is an update, or every two of them."""
    sections = {"goldilocks": {}, "only_signal": only_signal}
    sizes = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_iterations": 2}
    updates = {"gradient_accumulation_steps": accumulation, "max_steps": 16 // accumulation}
    one = watched(tmp_path, sections, **sizes, **updates)
    assert {now - wrote for now, wrote, _ in one.compared} == set(range(8 // accumulation))
    assert max(difference for *_, difference in one.compared) < 1e-4
