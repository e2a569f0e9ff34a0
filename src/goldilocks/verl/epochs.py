"""Epochs are passes over the data, counted in prompts issued; updates are another clock.

How many updates the epochs make is known only when they are over: each dropped group costs a prompt and trains nothing.
verl counts the updates as if no group were dropped: an upper bound.
"""

from __future__ import annotations

from typing import Any

from goldilocks.config.settings import Settings
from goldilocks.core import Collector
from goldilocks.dotted_keys import value_at
from goldilocks.drive.epochs import Epochs


class UpdatesPerEpoch(Epochs):
    """The epochs of ``trainer.total_epochs``, unless ``trainer.total_training_steps`` ends the run."""

    def __init__(self, trainer: Any, collector: Collector) -> None:
        """``trainer`` is that section of verl's config."""
        super().__init__(collector, trainer.total_epochs if trainer.total_training_steps is None else None)

    def __rfloordiv__(self, updates: int) -> int:
        """verl asks for ``updates // updates_per_epoch`` and ends at ``total_epochs``; ``over`` decides the end."""
        return int(min(self.current, self.prompts // self.size - 1))


def schedule_note(config: Any, settings: Settings, updates: int) -> str | None:
    """Return a note on a learning rate that is scheduled over ``updates``, if epochs end the run and groups drop."""
    if config.trainer.total_training_steps is not None or not settings.drops_groups:
        return None
    for section in ("actor_rollout_ref.actor.optim", "critic.optim"):
        optim = value_at(config, section) or {}
        kind = optim.get("lr_scheduler_type", optim.get("lr_decay_style", "constant"))
        if kind != "constant" or optim.get("lr_warmup_steps_ratio", 0):
            return (
                f"Goldilocks: trainer.total_epochs={config.trainer.total_epochs} makes {updates} updates at most, "
                f"fewer where groups are dropped. The learning rate of {section} ({kind}) is scheduled over {updates}: "
                "set trainer.total_training_steps to the number of updates that you expect"
            )
    return None
