"""What an update of the policy costs in rollouts, against what one costs GRPO with the same sizes.

A recipe that drops groups fills a batch from several batches of rollouts. With sizes chosen for GRPO it then makes a
fraction of GRPO's updates, and at one learning rate accuracy follows the updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from goldilocks.nested import value_at

BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
EPOCHS, N = "actor_rollout_ref.actor.ppo_epochs", "actor_rollout_ref.rollout.n"
BACKEND = "trainer.backend"

BATCHES = 3  # an average over fewer is mostly luck
TIMES = 4.0  # an update that costs more than so many of GRPO's is worth a word


def updates_per_line(config: Mapping[str, Any]) -> int:
    """TRL logs every update. verl logs every batch, and makes an update of each mini-batch in each epoch over it."""
    return 1 if value_at(config, BACKEND) == "trl" else _updates_per_batch(config)


def hint(config: Mapping[str, Any], generated: Sequence[int]) -> str | None:
    """Say once it is known that an update costs more than ``TIMES`` GRPO's, and which sizes would make as many updates.

    ``generated`` is the total of rollouts after each line of the metrics. The first line is left out: a resumed run
    has no total before it, and a new one fills what later batches find carried.
    """
    cost = _rollouts_per_update(config, generated)
    batch, mini_batch, n = (value_at(config, key) for key in (BATCH, MINI_BATCH, N))
    if cost is None or not (batch and mini_batch and n):
        return None
    plain = mini_batch * n / (value_at(config, EPOCHS) or 1)
    if cost <= TIMES * plain:
        return None
    said = f"an update costs {cost:,.0f} rollouts, {cost / plain:.1f} times GRPO's {plain:,.0f}"
    return f"{said}: {_advice(batch, mini_batch, mini_batch * plain / cost)}"


def _advice(batch: int, mini_batch: int, wanted: float) -> str:
    """The sizes that make as many updates of the same rollouts as GRPO makes; ``wanted`` groups in each."""
    if mini_batch == 1:
        return "choose prompts that differ more (goldilocks.selector), or other data"
    size = max(1, int(wanted))
    fits = max(one for one in range(1, size + 1) if batch % one == 0)
    smaller = size * (batch // mini_batch)
    many = "as many updates" if wanted >= 1 else f"{mini_batch} times the updates, still fewer than GRPO's,"
    return (
        f"{MINI_BATCH}={fits} would make {many} of them, "
        f"or {BATCH}={smaller} with {MINI_BATCH}={size}, each from newer rollouts"
    )


def _rollouts_per_update(config: Mapping[str, Any], generated: Sequence[int]) -> float | None:
    """The mean over whole batches after the first line, or None before there are ``BATCHES`` of them."""
    lines_per_batch = max(1, _updates_per_batch(config) // updates_per_line(config))
    batches = (len(generated) - 1) // lines_per_batch
    if batches < BATCHES:
        return None
    return (generated[batches * lines_per_batch] - generated[0]) / (batches * _updates_per_batch(config))


def _updates_per_batch(config: Mapping[str, Any]) -> int:
    batch, mini_batch = value_at(config, BATCH), value_at(config, MINI_BATCH)
    mini_batches = max(1, round(batch / mini_batch)) if batch and mini_batch else 1
    return mini_batches * (value_at(config, EPOCHS) or 1)
