"""The error of a step that cannot be filled, and its words."""

from __future__ import annotations

from goldilocks.core.limits import Limits
from goldilocks.core.statistics import StepStatistics


class Exhausted(ValueError):
    """The limits, or the data, leave too few groups for a batch. Nothing is lost: the state can be saved as it is."""

    @classmethod
    def after(cls, limits: Limits, step: StepStatistics, gen_batch_size: int, kept: str, visits: str) -> Exhausted:
        """Return the error for a step under these limits."""
        batches, most = step.num_gen_batches(gen_batch_size), limits.max_num_gen_batches
        if 0 < most <= batches:
            return cls(
                f"num_gen_batches={batches} >= max_num_gen_batches={most}. "
                "Generated too many batches. Please check if your data are too difficult."
            )
        return cls(
            f"{kept} and no more can be had: {step.rollouts_asked} rollouts "
            f"of max_rollouts_per_step={limits.max_rollouts_per_step}, "
            f"{step.tokens_arrived} tokens of max_tokens_per_step={limits.max_tokens_per_step}, {visits}"
        )
