"""Rule-based rewards are graded in the process that has the answer.

verl builds a batch of one row for every rollout, sends it to a reward worker, and waits for the number that comes back:
milliseconds of two processes for a comparison of two strings. Reward models, and reward managers other than verl's
default one, keep that way.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from goldilocks.hashing import is_known
from goldilocks.verl.patches.patch import Function, Kind, Patch

MANAGER = "naive"
RUN_SINGLE = "89e2c1e4e0d30a79"  # the digest of the default manager's method, which ``grade`` follows


def graded_here(original: Function) -> Function:
    """The reward of a finished rollout, from the default reward manager in this process."""

    @functools.wraps(original)
    async def _compute_score(self: Any, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        final = outputs[-1]
        waits = final.reward_score is None and self.reward_loop_worker_handles is not None
        manager = manager_of(self) if waits else None
        if manager is None:
            await original(self, outputs, kwargs)
            return
        started = time.perf_counter()
        final.reward_score, final.extra_fields["reward_extra_info"] = await grade(manager, final, kwargs)
        final.metrics.compute_score = time.perf_counter() - started

    return _compute_score


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
    """The default manager, made once in a worker; None where rewards are another's to give."""
    if not hasattr(worker, "_goldilocks_rewards"):
        worker._goldilocks_rewards = _make_manager(worker)
    return worker._goldilocks_rewards


def _make_manager(worker: Any) -> Any:
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import load_reward_manager

    reward = worker.config.reward
    sandbox = (reward.get("sandbox_fusion") or {}).get("url")
    if reward.reward_model.enable or reward.reward_manager.name != MANAGER or sandbox:
        return None
    manager = load_reward_manager(worker.config, worker.tokenizer)
    ours = type(manager) is NaiveRewardManager and is_known(NaiveRewardManager.run_single, RUN_SINGLE)
    return manager if ours else None


REWARDS_HERE = Patch(
    name="rewards-here",
    kind=Kind.SPEED,
    module="verl.experimental.agent_loop.agent_loop",
    replaced={"AgentLoopWorker._compute_score": graded_here},
    written_for={"AgentLoopWorker._compute_score": "cf4b57719ad3c1b2"},
    reason="verl sends every rollout to a reward worker in a batch of its own; the default manager's rules run here",
    changes="nothing: the same values",
    without="CPU +18 % (+16 to +21) with verl's agent loop",
    needless_when="verl grades by rules in the process that has the answer",
)
