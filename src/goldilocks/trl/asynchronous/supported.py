"""What is taken for granted of TRL's asynchronous trainer, which is experimental: the sources ours was written for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

from goldilocks.hashing import digest
from goldilocks.trl.supported import warn_of

VERSION = "1.16"
KNOWN: list[tuple[Callable[..., Any], str]] = [
    (async_grpo_trainer.RolloutQueueDataset.__iter__, "d92a084c61a3511c"),
    (async_grpo_trainer.DataCollatorForRollout.torch_call, "fc1ce59367d57b6f"),
    (async_grpo_trainer.AsyncGRPOTrainer.get_train_dataloader, "2950938428f1c183"),
    (async_grpo_trainer.AsyncGRPOTrainer._inner_training_loop, "83ea8e8f30f62e92"),
    (async_grpo_trainer.AsyncGRPOTrainer._save_checkpoint, "ac7c7c0f73d720da"),
    (async_grpo_trainer.AsyncGRPOTrainer._sync_weight_lora, "4a4ad08eb92eaf64"),
    (async_rollout_worker._AsyncRolloutLoop._generate_one, "a412fb0898da0d95"),
    (async_rollout_worker._AsyncRolloutLoop._generate_one_turn, "3bb24a643860d38e"),
    (async_rollout_worker._AsyncRolloutLoop._score_group, "d032308d2e87d971"),
    (async_rollout_worker._AsyncRolloutLoop._run_loops, "664f17f542dfcc7d"),
    (async_rollout_worker.AsyncRolloutWorker.start, "32344ffaef4ab484"),
]


def changed() -> list[str]:
    """Return the functions of TRL that are not those Goldilocks was written for."""
    return [function.__qualname__ for function, known in KNOWN if digest(function) != known]


def check_trl() -> None:
    """Warn where TRL has changed under our feet."""
    warn_of(changed(), VERSION)
