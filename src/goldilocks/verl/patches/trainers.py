"""Names in verl's modules that stand for something of ours in the processes of our trainers."""

from __future__ import annotations

from typing import Any

from goldilocks.verl.patch import Kind, Patch


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
    name="gathered-puts",
    kind=Kind.TRAINER,
    module="verl.trainer.ppo.v1.agent_loop_tq",
    replaced={"tq": gathering_queue, "list_of_dict_to_tensordict": rows_unpacked},
    written_for={"AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess": "523edacbff73640d"},
    reason="verl packs and stores each rollout by itself; rollouts that end together are packed and stored together",
    changes="nothing: the same values",
    without="CPU +63 % (+60 to +68) with verl's agent loop",
    needless_when="verl's worker stores what ends together in one put",
)

# Applied by our V1 trainer in its own process.
GROUP_NUMBERS = Patch(
    name="group-numbers",
    kind=Kind.TRAINER,
    module="verl.trainer.ppo.v1.trainer_base",
    replaced={"tq": numbering_queue},
    written_for={"PPOTrainer._compute_advantage": "2a4a2aa4a475b228"},
    reason="verl fetches and pads the uid of every row to know its group, which takes longer than the advantages",
    changes="nothing: the same values",
    without="CPU +5 % (+2 to +9)",
    needless_when="verl reads a row's group off its key",
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
