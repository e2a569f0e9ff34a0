"""Callbacks of TRL's trainer: one for the budget, and one for the guard for old weights.

``goldilocks.budget`` ends training at the update that has reached a cost. The guard for old weights
(``goldilocks.on_stale_weights``) compares the sampling engine's log-probs with the trainer's in every update. TRL's own
``generate`` samples with the weights that are trained, and returns no log-probs; Goldilocks' engine and vLLM have
weights of their own, and return theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from goldilocks.losses.log_probs import WeightsGuard, gap_sums, has_experts, mean_gap
from goldilocks.runs.costs import Budget, Meter
from goldilocks.trl.collection import Processes
from goldilocks.trl.rows import LOG_PROBS, SAMPLED


class Over(Exception):
    """The checkpoint that a run would go on from is its last."""


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
        """Raise ``Over`` where nothing is left to do: the Trainer makes an update before it looks."""
        self._running = False
        spent = bool(self._budget.costs) and self._processes.decided(lambda: self._spent()[0])
        if spent or state.global_step >= state.max_steps:
            raise Over

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


class WeightsGuardCallback(TrainerCallback):
    """The guard for old weights: adds up how far the engine's log-probs are from the trainer's, over all processes."""

    def __init__(self, guard: WeightsGuard, accelerator: Any, logged: dict[str, list[float]]) -> None:
        """``logged`` are the values that TRL logs the means of."""
        self._guard = guard
        self._accelerator = accelerator
        self._logged = logged
        self._sums = torch.zeros(2, dtype=torch.float64)
        self.metrics: dict[str, float] = {}  # of the last update

    def see(self, inputs: Mapping[str, Any], log_probs: Tensor) -> None:
        """Add a micro-batch up; call this before ``old_per_token_logps`` is filled with ``log_probs``."""
        sampled = inputs.get(SAMPLED)
        if sampled is not None:
            own, fresh = trainers_log_probs(inputs, log_probs, sampled)
            self._sums += gap_sums(own, sampled, fresh).cpu()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Judge the update whose micro-batches are all there."""
        here = self._sums.float().to(self._accelerator.device)  # a loss may be computed on the host
        sums = self._accelerator.reduce(here, reduction="sum")
        self._sums.zero_()
        self.metrics = self._guard.observe(mean_gap(sums.tolist()))
        for name, value in self.metrics.items():
            self._logged.setdefault(name, []).append(value)


def trainers_log_probs(inputs: Mapping[str, Any], now: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the trainer's log-probs from when the rows were written, and which tokens they can be compared for.

    TRL computes them as ``old_per_token_logps`` where a batch serves several updates; else they are those of ``now``.
    A carried row has the engine's own in their place, which say nothing.
    """
    mask = inputs["completion_mask"].bool()
    if "tool_mask" in inputs:  # the tokens of tools are not the model's
        mask = mask & inputs["tool_mask"].bool()
    old = inputs.get(LOG_PROBS)
    if old is None:
        return now, mask
    own = torch.where(old.isnan(), now, old)
    copied = ((old == sampled) | ~mask).all(1, keepdim=True)
    return own, mask & ~copied


def weights_guard(args: Any, model: nn.Module, action: str) -> WeightsGuard:
    """Return the guard of a run; ``action`` is ``goldilocks.on_stale_weights``."""
    return WeightsGuard(action, exact=is_exact(args, model), judges=is_comparable(args, model))


def is_exact(args: Any, model: nn.Module) -> bool:
    """Whether trainer and engine both compute in fp32."""
    half = args.bf16 or args.fp16 or getattr(args, "use_vllm", False)
    return not half and all(one.dtype == torch.float32 for one in model.parameters())


def is_comparable(args: Any, model: nn.Module) -> bool:
    """Whether nothing but rounding tells the engine's log-probs from the trainer's."""
    dropped = any(isinstance(one, nn.Dropout) and one.p > 0 for one in model.modules())
    config: Any = getattr(model, "config", None)
    routed = config is not None and has_experts(config.to_dict())
    # Tokens are left out of the distribution that the engine reports.
    bound = getattr(args, "vllm_structured_outputs_regex", None)
    cut = (args.top_p or 1.0) < 1 or (args.top_k or 0) > 0 or getattr(args, "min_p", None) or bound
    # The engine reports logits that more than the temperature has changed.
    altered = (getattr(args, "repetition_penalty", None) or 1.0) != 1 or getattr(args, "generation_kwargs", None)
    # A vLLM server, whose options are its own, may report log-probs without the temperature.
    raw = getattr(args, "use_vllm", False) and args.vllm_mode == "server" and args.temperature != 1
    return not (dropped or routed or cut or altered or raw)
