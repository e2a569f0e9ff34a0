"""``goldilocks.guard`` on TRL: tokens are masked in the loss; an update is skipped right before it would be made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from goldilocks.algorithms.behaviour import UpdateGuard
from goldilocks.core.replay import Guard
from goldilocks.errors import require
from goldilocks.trl.rows import LOG_PROBS

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")  # a token's term is as large as its advantage


def check(trainer: Any, guard: Guard) -> None:
    """Refuse what the guard cannot hold in."""
    key, kind = "goldilocks.guard.enable", getattr(trainer.args, "loss_type", "rloo")
    require(kind in LOSSES, key, guard.enable, f"False with loss_type={kind!r}; True with {', '.join(LOSSES)}")
    liger = getattr(trainer, "use_liger_kernel", False)  # a loss of its own, which never shows its log-probs
    for what, there in (("use_liger_kernel", liger), ("DeepSpeed", trainer.is_deepspeed_enabled)):
        require(not there, key, guard.enable, f"False with {what}")


class GuardCallback(TrainerCallback):
    """Sees every micro-batch of a training run, and gives the verdict on each update, the same on all processes."""

    def __init__(self, guard: Guard, accelerator: Any, logged: dict[str, list[float]]) -> None:
        """``logged`` are the values that TRL logs the means of."""
        self._guard = UpdateGuard(guard.bound, guard.skip)
        self._accelerator = accelerator
        self._logged = logged
        self.metrics: dict[str, float] = {}  # of the last update

    def advantages(self, inputs: Mapping[str, Any], log_probs: Tensor) -> Tensor:
        """Return the advantages of a micro-batch by token; those of masked tokens are zero."""
        mask = inputs["completion_mask"]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        behaviour = inputs.get(LOG_PROBS, torch.full_like(log_probs, torch.nan))
        given = inputs["advantages"]
        return self._guard.guarded(log_probs, behaviour, given.unsqueeze(1) if given.dim() == 1 else given, mask)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Take the gradients away where the update is skipped.

        The optimizer then changes no parameter, no moment and no count of its own. The learning rate's schedule and
        the step count go on: a skipped update has been one of ``max_steps``.
        """
        verdict = self._guard.verdict(self._summed)
        self.metrics = verdict.metrics
        for name, value in verdict.metrics.items():
            self._logged.setdefault(name, []).append(value)
        if verdict.skip:
            given["optimizer"].zero_grad()

    def _summed(self, sums: Tensor) -> Tensor:
        device = self._accelerator.device  # a loss may be computed on the host; processes meet on their devices
        summed: Tensor = self._accelerator.reduce(sums.to(device), reduction="sum")
        return summed
