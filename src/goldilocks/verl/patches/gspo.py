"""verl's GSPO loss with the metrics of its clipping."""

from __future__ import annotations

from typing import Any


def measured(original: Any) -> Any:
    """Register the measured loss too: verl looks a loss up by name, the module's function is a second reference."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    from goldilocks.algorithms.gspo import with_clipping_metrics

    return register_policy_loss("gspo")(with_clipping_metrics(original))
