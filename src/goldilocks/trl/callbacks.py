"""Callbacks of TRL's trainer: ``goldilocks.budget`` ends training at a cost, ``goldilocks.guard`` holds an update back.

Training ends at the update that has reached a cost. Tokens that the guard masks are masked in the loss; an update is
skipped right before it would be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from goldilocks.algorithms.behaviour import UpdateGuard
from goldilocks.core.replay import Guard
from goldilocks.errors import require
from goldilocks.runs.costs import Budget, Meter
from goldilocks.trl.processes import Processes
from goldilocks.trl.rows import LOG_PROBS

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")  # a token's term is as large as its advantage


class BudgetCallback(TrainerCallback):
    """Measures every update on the first process, and tells the others."""

    def __init__(self, budget: Budget, meter: Meter | None, processes: Processes) -> None:
        """``meter`` is the driver's, which is there on the first process only."""
        self._budget = budget
        self._meter = meter
        self._processes = processes
        self._running = False  # the clock

    def begin(self) -> None:
        """Start the clock of an update, unless it runs."""
        if self._meter is not None and not self._running:
            self._meter.begin_update()
        self._running = True

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._running = False

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.begin()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        """End training at the end of the budget; evaluate where another part of it is spent, if that is asked for."""
        self._running = False
        if self._meter is not None:
            self._meter.end_update()
        if self._budget.costs:
            spent, due = self._processes.decided(self._spent)
            control.should_training_stop = control.should_training_stop or spent
            # Spread over the cost they are in the place of ``eval_steps``, which the Trainer has judged by now.
            control.should_evaluate = due if self._budget.validations else control.should_evaluate
        return control

    def _spent(self) -> tuple[bool, bool]:
        assert self._meter is not None
        return self._meter.share >= 1, self._meter.validation_due()

    def metrics(self) -> dict[str, float]:
        return {"budget/spent": self._meter.share} if self._meter is not None and self._budget.costs else {}


def check_guard(trainer: Any, guard: Guard) -> None:
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
