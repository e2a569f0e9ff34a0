"""Patches of verl's trainers and workers: advantages, the V0 trainer, rewards by rules, reports of failures.

The wrappers that report failures are in ``verl.dispatch.failures``, which is imported when one is applied.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

from goldilocks.hashing import Sources, is_known
from goldilocks.verl.patch import Function, Kind, Patch

FAILURES = "goldilocks.verl.dispatch.failures"


def responses_nested_at_once(original: Function) -> Function:
    """The rows of a field cut all at once; verl cuts each by itself."""
    from goldilocks.verl.patches.padding import nested_as

    return functools.wraps(original)(functools.partial(nested_as))


GRPO: Sources = "1ae54c999b7df21e"  # of verl's estimator, whose values these are
BY_NAME: Sources = "314695381c755264"  # of the function that calls it


def groups_at_once(original: Function) -> Function:
    """Advantages of GRPO, group by group; verl takes every row of a group by itself."""
    from verl.trainer.ppo import core_algos, ray_trainer

    known = is_known(core_algos.compute_grpo_outcome_advantage, GRPO) and is_known(
        ray_trainer.compute_advantage, BY_NAME
    )

    @functools.wraps(original)
    def compute_advantage_for_multi_trajectories(data: Any, batch_keys: list[str], **options: Any) -> Any:
        from goldilocks.runs.records import part_of_row
        from goldilocks.verl.estimators import grpo_by_group

        if not known or options["adv_estimator"] != "grpo" or any(map(part_of_row, batch_keys)):
            return original(data, batch_keys=batch_keys, **options)
        by_std = options.get("norm_adv_by_std_in_grpo", True)
        rewards, mask = data.batch["token_level_rewards"], data.batch["response_mask"]
        data.batch["advantages"] = grpo_by_group(rewards, mask, data.non_tensor_batch["uid"], by_std)
        data.batch["returns"] = data.batch["advantages"]
        return data

    return compute_advantage_for_multi_trajectories


def sampling_trainer(_trainer: Any) -> Any:
    """Our V0 trainer, where verl's task runner has hardcoded its own."""
    from goldilocks.verl.v0.trainer import RayPPOTrainerWithSampling

    return RayPPOTrainerWithSampling


# Applied by our V1 trainer in its own process.
GROUP_NUMBERS = Patch(
    name="group-numbers",
    kind=Kind.TRAINER,
    module="verl.trainer.ppo.v1.trainer_base",
    replaced={
        "response_to_nested": responses_nested_at_once,
        "compute_advantage_for_multi_trajectories": groups_at_once,
    },
    written_for={
        "response_to_nested": "a2272158cd69af64",
        "compute_advantage_for_multi_trajectories": "d973cc8aec79bc3d",
    },
    reason="verl takes the rows of a group, and the responses of a field, one by one",
    changes="nothing: the same values",
    without="not measured yet",
    needless_when="verl computes the advantages of a group at once",
)

# Applied by the task runner of our V0 trainer in its own process.
V0_TRAINER = Patch(
    name="v0-trainer",
    kind=Kind.TRAINER,
    module="verl.trainer.main_ppo_v0",
    replaced={"RayPPOTrainer": sampling_trainer},
    written_for={"TaskRunner.__ray_metadata__.modified_class.run": "95ebfb4a9286d46a"},
    reason="verl's V0 task runner hardcodes the class of its trainer",
    changes="the trainer is RayPPOTrainerWithSampling",
    without="there is no way to our trainer on V0",
    needless_when="verl's V0 task runner takes the class of its trainer as an argument",
)


def graded_here(original: Function) -> Function:
    """Have the default reward manager grade a finished rollout in this process.

    verl sends a batch of one row to a reward worker: milliseconds of two processes for a comparison of two strings.
    Reward models and other reward managers keep that way.
    """
    from goldilocks.verl.dispatch.rewards import grade, manager_of

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


def _by(name: str) -> Callable[[Any], Any]:
    return lambda original: getattr(importlib.import_module(FAILURES), name)(original)


FAILURES_TOLD = Patch(
    name="failures-told",
    kind=Kind.REPORTS,
    module="verl.trainer.ppo.v1.agent_loop_tq",
    replaced={
        "_settle_session_tasks": _by("publish_first_error"),
        "AgentLoopManagerTQ.generate_sequences": _by("remember_workers"),
    },
    written_for={
        "_settle_session_tasks": "21a713e8560104b4",
        "AgentLoopManagerTQ.generate_sequences": "de5ab7fe338523ca",
    },
    reason="the error of a rollout stands in a worker's log only; it is put where the trainer finds it",
    changes="nothing that is computed",
    without="a run whose rollouts fail ends without the reason",
    needless_when="verl puts the error of a rollout beside its status",
)

FAILURES_HEARD = Patch(
    name="failures-heard",
    kind=Kind.REPORTS,
    module="verl.trainer.ppo.v1.replay_buffer",
    replaced={
        "ReplayBuffer.sample": _by("name_first_error"),
        "ReplayBuffer._wait_for_next_poll": _by("look_after_workers"),
    },
    written_for={"ReplayBuffer.sample": "cdcecebeb7f0b44e", "ReplayBuffer._wait_for_next_poll": "10088bf03da69383"},
    reason="a batch of which no rollout succeeded ends the run with the first reason; so does a worker that died",
    changes="a validation without one success ends the run, where verl goes on with an empty batch",
    without="a run whose worker died waits for ever",
    needless_when="verl's replay buffer watches the workers that fill it",
)


def measured(original: Any) -> Any:
    """Register the measured loss too: verl looks a loss up by name, the module's function is a second reference."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    from goldilocks.losses.policy_loss import with_clipping_metrics

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
