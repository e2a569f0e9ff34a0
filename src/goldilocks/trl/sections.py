"""The sections that a user gives to the trainer: the same keys and defaults as in verl's config, from one definition.

Batch sizes, the seed and the longest answer come from ``GRPOConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from goldilocks.config.settings import Settings, reward_calls
from goldilocks.errors import require
from goldilocks.types import OnFull

Section = Mapping[str, Any]


@dataclass(frozen=True)
class Sections:
    """What the trainer was given. Nothing at all leaves the trainer exactly TRL's."""

    filter_groups: Section | None = None
    adaptive_rollout: Section | None = None
    goldilocks: Section | None = None
    batch_filter: Section | None = None
    gen_batch_size: int | None = None

    @property
    def given(self) -> bool:
        """Whether the user asked for anything."""
        return any(value is not None for value in asdict(self).values())

    def config(self, args: Any) -> dict[str, Any]:
        """Return the config that verl would have for this: what ``Settings`` reads, and what a report shows."""
        return {
            "data": {
                "train_batch_size": args.generation_batch_size // args.num_generations,
                "gen_batch_size": self.gen_batch_size,
                "max_response_length": args.max_completion_length,
                "seed": args.seed,
            },
            "actor_rollout_ref": {"rollout": {"n": args.num_generations}},
            "algorithm": {"use_kl_in_reward": False, "filter_groups": dict(self.filter_groups or {})},
            "adaptive_rollout": dict(self.adaptive_rollout or {}),
            "goldilocks": dict(self.goldilocks or {}),
            "batch_filter": None if self.batch_filter is None else dict(self.batch_filter),
        }

    def settings(self, args: Any) -> Settings:
        """Read and check; every error names the key, the value and what is accepted."""
        settings = Settings.from_config(self.config(args))
        aggregation = settings.policies.loss_agg
        on_full = settings.surplus().on_full
        accepted = "finish or requeue on TRL; verl's V1 trainer has partial"
        require(on_full is not OnFull.PARTIAL, "filter_groups.on_full", on_full, accepted)
        require(aggregation is None, "goldilocks.loss_agg", aggregation, "none on TRL; GRPOConfig.loss_type decides it")
        self.refuse_rewards()
        return settings

    def refuse_rewards(self) -> None:
        """Refuse ``goldilocks.rewards``, which TRL's reward functions know nothing of."""
        given = self.goldilocks or {}
        accepted = (
            "no key on TRL, which has reward_funcs and reward_weights; goldilocks.rewards.judge makes a reward_func"
        )
        unused = not reward_calls({"goldilocks": given}).in_use
        require(unused, "goldilocks.rewards", given.get("rewards"), accepted)
