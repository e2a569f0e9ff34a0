"""Names in verl's modules that stand for something of ours in the processes of our trainers."""

from __future__ import annotations

from typing import Any

from goldilocks.verl.patches.patch import Kind, Patch


def gathering_queue(_transfer_queue: Any) -> Any:
    """The TransferQueue as verl's worker sees it, with rollouts that end together put together."""
    from goldilocks.verl.store.batched_puts import GatheringQueue

    return GatheringQueue()


def rows_unpacked(_pack: Any) -> Any:
    """``list``: what is put together is packed together, by ``BatchedPuts``."""
    return list


def numbering_queue(_transfer_queue: Any) -> Any:
    """The TransferQueue as verl's trainer sees it, with groups by number while advantages are computed."""
    from goldilocks.verl.update.driver_queue import DriverQueue

    return DriverQueue()


def sampling_trainer(_trainer: Any) -> Any:
    """Our V0 trainer, where verl's task runner has hardcoded its own."""
    from goldilocks.verl.compat.trainer import RayPPOTrainerWithSampling

    return RayPPOTrainerWithSampling


# Applied by the worker of our V1 trainer in its own process.
GATHERED_PUTS = Patch(
    "gathered-puts",
    Kind.TRAINER,
    "verl.trainer.ppo.v1.agent_loop_tq",
    {"tq": gathering_queue, "list_of_dict_to_tensordict": rows_unpacked},
    {"AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess": "523edacbff73640d"},
    "verl packs and stores each rollout by itself; rollouts that end together are packed and stored together",
    "nothing: the same values",
    "CPU +63 % (+60 to +68) with verl's agent loop",
    "verl's worker stores what ends together in one put",
)

# Applied by our V1 trainer in its own process.
GROUP_NUMBERS = Patch(
    "group-numbers",
    Kind.TRAINER,
    "verl.trainer.ppo.v1.trainer_base",
    {"tq": numbering_queue},
    {"PPOTrainer._compute_advantage": "2a4a2aa4a475b228"},
    "verl fetches and pads the uid of every row to know its group, which takes longer than the advantages",
    "nothing: the same values",
    "CPU +2 % (-2 to +6)",
    "verl reads a row's group off its key",
)

# Applied by the task runner of our V0 trainer in its own process.
V0_TRAINER = Patch(
    "v0-trainer",
    Kind.TRAINER,
    "verl.trainer.main_ppo_v0",
    {"RayPPOTrainer": sampling_trainer},
    {"TaskRunner.__ray_metadata__.modified_class.run": "95ebfb4a9286d46a"},
    "verl's V0 task runner hardcodes the class of its trainer",
    "the trainer is RayPPOTrainerWithSampling",
    "there is no way to our trainer on V0",
    "verl's V0 task runner takes the class of its trainer as an argument",
)
