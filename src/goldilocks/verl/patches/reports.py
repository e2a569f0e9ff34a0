"""A run that fails says why. The wrappers are in ``verl.dispatch.failures``, imported where one is applied."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from goldilocks.verl.patches.patch import Kind, Patch

FAILURES = "goldilocks.verl.dispatch.failures"


def _by(name: str) -> Callable[[Any], Any]:
    return lambda original: getattr(importlib.import_module(FAILURES), name)(original)


FAILURES_TOLD = Patch(
    "failures-told",
    Kind.REPORTS,
    "verl.trainer.ppo.v1.agent_loop_tq",
    {
        "_settle_session_tasks": _by("publish_first_error"),
        "AgentLoopManagerTQ.generate_sequences": _by("remember_workers"),
    },
    {"_settle_session_tasks": "21a713e8560104b4", "AgentLoopManagerTQ.generate_sequences": "de5ab7fe338523ca"},
    "the error of a rollout stands in a worker's log only; it is put where the trainer finds it, with the workers",
    "nothing that is computed",
    "a run whose rollouts fail ends without the reason",
    "verl puts the error of a rollout beside its status",
)

FAILURES_HEARD = Patch(
    "failures-heard",
    Kind.REPORTS,
    "verl.trainer.ppo.v1.replay_buffer",
    {"ReplayBuffer.sample": _by("name_first_error"), "ReplayBuffer._wait_for_next_poll": _by("look_after_workers")},
    {"ReplayBuffer.sample": "cdcecebeb7f0b44e", "ReplayBuffer._wait_for_next_poll": "10088bf03da69383"},
    "a batch of which no rollout succeeded ends the run with the first reason; so does a worker that died",
    "a validation without one success ends the run, where verl goes on with an empty batch",
    "a run whose worker died waits for ever",
    "verl's replay buffer watches the workers that fill it",
)
