"""verl's GSPO loss with the metrics of its clipping."""

from __future__ import annotations

from typing import Any

from goldilocks.verl.patch import Kind, Patch


def measured(original: Any) -> Any:
    """Register the measured loss too: verl looks a loss up by name, the module's function is a second reference."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    from goldilocks.algorithms.gspo import with_clipping_metrics

    return register_policy_loss("gspo")(with_clipping_metrics(original))


GSPO_METRICS = Patch(
    name="gspo-metrics",
    kind=Kind.ALGORITHM,
    module="verl.trainer.ppo.core_algos",
    replaced={"compute_policy_loss_gspo": measured},
    written_for={"compute_policy_loss_gspo": ("fd4ceb495b6b2c75", "7f1a2a61301e42c2")},
    reason="the shares clipped on each side and the sequences' importance ratio are logged",
    changes="nothing but the metrics; the loss is verl's",
    without="runs of GSPO lack five metrics",
    needless_when="verl's GSPO logs its sequences' importance ratio",
)
