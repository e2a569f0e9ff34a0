"""``python -m goldilocks.main_ppo_adaptive …``: ``goldilocks.main_ppo`` with adaptive rollouts."""

from __future__ import annotations

from goldilocks.main_ppo import main

if __name__ == "__main__":
    main("++adaptive_rollout.enable=True", module="goldilocks.main_ppo_adaptive")
