"""``goldilocks.budget`` on TRL: training ends at the update that has reached a cost."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from goldilocks.runs.costs import Budget, Meter
from goldilocks.trl.processes import Processes


class BudgetCallback(TrainerCallback):
    """Measures every update on the first process, and tells the others."""

    def __init__(self, budget: Budget, meter: Meter | None, processes: Processes) -> None:
        """``meter`` is the driver's, which is there on the first process only."""
        self._budget = budget
        self._meter = meter
        self._processes = processes

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._meter is not None:
            self._meter.begin_update()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        """End training at the end of the budget; evaluate where another part of it is spent, if that is asked for."""
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
