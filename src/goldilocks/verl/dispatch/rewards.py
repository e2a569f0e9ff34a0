"""Grades an answer by verl's default reward manager, in the process that has the answer."""

from __future__ import annotations

import functools
from typing import Any

from goldilocks.hashing import is_known

MANAGER = "naive"
RUN_SINGLE = "89e2c1e4e0d30a79"  # the digest of the default manager's method, which ``grade`` follows


async def grade(manager: Any, output: Any, row: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """As ``NaiveRewardManager.run_single`` of the same rollout: the score, and what else the function returned."""
    known = {**(row.get("extra_info") or {}), **output.extra_fields}
    arguments = {
        "data_source": row["data_source"],
        "solution_str": manager.tokenizer.decode(output.response_ids, skip_special_tokens=True),
        "ground_truth": row["reward_model"]["ground_truth"],
        "extra_info": {**known, "num_turns": output.num_turns, "rollout_reward_scores": row.get("reward_scores", {})},
    }
    if manager.is_async_reward_score:
        result = await manager.compute_score(**arguments)
    else:
        result = await manager.loop.run_in_executor(None, functools.partial(manager.compute_score, **arguments))
    return (result["score"], dict(result)) if isinstance(result, dict) else (result, {"acc": result})


def manager_of(worker: Any) -> Any:
    """Return verl's default manager, made once in a worker; None where rewards are another's to give."""
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import load_reward_manager

    if not hasattr(worker, "_goldilocks_rewards"):
        reward = worker.config.reward
        sandbox = (reward.get("sandbox_fusion") or {}).get("url")
        plain = not reward.reward_model.enable and reward.reward_manager.name == MANAGER and not sandbox
        manager = load_reward_manager(worker.config, worker.tokenizer) if plain else None
        ours = type(manager) is NaiveRewardManager and is_known(NaiveRewardManager.run_single, RUN_SINGLE)
        worker._goldilocks_rewards = manager if ours else None
    return worker._goldilocks_rewards
