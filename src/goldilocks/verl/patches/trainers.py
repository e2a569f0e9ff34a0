"""Patches of verl's trainers and workers: the V0 trainer, reports of failures, metrics of GSPO.

The wrappers that report failures are in ``verl.dispatch.failures``, which is imported when one is applied.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from goldilocks.engine.cpu import avoid_cudnn
from goldilocks.verl.patch import Function, Kind, Patch, around

FAILURES = "goldilocks.verl.dispatch.failures"


def sampling_trainer(_trainer: Any) -> Any:
    """Our V0 trainer, where verl's task runner has hardcoded its own."""
    from goldilocks.verl.v0.trainer import RayPPOTrainerWithSampling

    return RayPPOTrainerWithSampling


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


@around
def without_cudnn(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Make a training engine after cuDNN's attention is switched off in its process."""
    avoid_cudnn()
    return original(*args, **kwargs)


CUDNN_ATTENTION = Patch(
    name="cudnn-attention",
    kind=Kind.RESULTS,
    module="verl.workers.engine.base",
    replaced={"EngineRegistry.new": without_cudnn},
    written_for={"EngineRegistry.new": "d9bbf786fdddb499"},
    reason="since torch 2.11 masked attention on an H100 or H200 is cuDNN's, whose gradient is NaN at some lengths",
    changes="attention is computed by torch's other kernels",
    without="the gradient of a query may be NaN (pytorch issue 196678), and the run is lost",
    needless_when="torch has a cuDNN that is right, or no longer takes it by default",
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
