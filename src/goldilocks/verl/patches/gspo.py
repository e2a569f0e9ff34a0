"""verl's GSPO loss with the metrics of its clipping."""

from __future__ import annotations

from typing import Any

from goldilocks.verl.patches.patch import Kind, Patch


def measured(original: Any) -> Any:
    """Register the measured loss too: verl looks a loss up by name, the module's function is a second reference."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    from goldilocks.algorithms.gspo import with_clipping_metrics

    return register_policy_loss("gspo")(with_clipping_metrics(original))


GSPO_METRICS = Patch(
    "gspo-metrics",
    Kind.ALGORITHM,
    "verl.trainer.ppo.core_algos",
    {"compute_policy_loss_gspo": measured},
    {"compute_policy_loss_gspo": "fd4ceb495b6b2c75"},
    "the shares clipped on each side and the sequences' importance ratio are logged",
    "nothing but the metrics; the loss is verl's",
    "runs of GSPO lack five metrics",
    "verl's GSPO logs its sequences' importance ratio",
)
