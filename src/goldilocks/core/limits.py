"""The bounds a step is held to, and what happens to what is left over."""

from __future__ import annotations

from dataclasses import dataclass

from goldilocks.errors import require

ON_EXHAUSTED = ("error", "shrink", "backfill")
ON_FULL = ("finish", "requeue")


@dataclass(frozen=True)
class Limits:
    """What one step may cost. None, or a ``max_num_gen_batches`` of 0 or less, is no limit.

    Nothing here is ever exceeded: tokens are not known before they are written, so ``max_tokens_per_step`` reserves
    ``max_tokens_per_rollout`` for each rollout in flight.
    """

    max_num_gen_batches: int = 0
    max_rollouts_per_step: int | None = None
    max_tokens_per_step: int | None = None
    max_tokens_per_rollout: int | None = None
    max_retries: int = 2
    on_exhausted: str = "error"

    def __post_init__(self) -> None:
        for key in ("max_rollouts_per_step", "max_tokens_per_step", "max_tokens_per_rollout"):
            value = getattr(self, key)
            require(value is None or value > 0, f"limits.{key}", value, "a number above 0, or none for no limit")
        require(self.max_retries >= 0, "limits.max_retries", self.max_retries, "0 or more")
        require(
            self.on_exhausted in ON_EXHAUSTED,
            "limits.on_exhausted",
            self.on_exhausted,
            f"one of {', '.join(ON_EXHAUSTED)}",
        )
        require(
            self.max_tokens_per_step is None or self.max_tokens_per_rollout is not None,
            "limits.max_tokens_per_rollout",
            self.max_tokens_per_rollout,
            "with max_tokens_per_step, the longest a rollout can be",
        )


@dataclass(frozen=True)
class Surplus:
    """What becomes of groups beyond the batch.

    Kept groups are carried while no older than ``max_carry_steps`` updates. Groups still open when the batch is full
    finish and are judged (``finish``), or are cancelled and their prompts go to the head of the queue (``requeue``):
    either way no slow prompt starves.
    """

    max_carry_steps: int = 1
    on_full: str = "finish"

    def __post_init__(self) -> None:
        require(self.max_carry_steps >= 0, "surplus.max_carry_steps", self.max_carry_steps, "0 or more updates")
        require(self.on_full in ON_FULL, "surplus.on_full", self.on_full, f"one of {', '.join(ON_FULL)}")
