"""Names in verl's modules that stand for something of ours in the processes of our trainers."""

from __future__ import annotations

from typing import Any


def gathering_queue(_transfer_queue: Any) -> Any:
    """The TransferQueue as verl's worker sees it, with rollouts that end together put together."""
    from goldilocks.verl.store.batched_puts import GatheringQueue

    return GatheringQueue()


def rows_unpacked(_pack: Any) -> Any:
    """``list``: what is put together is packed together, by the outbox."""
    return list


def numbering_queue(_transfer_queue: Any) -> Any:
    """The TransferQueue as verl's trainer sees it, with groups by number while advantages are computed."""
    from goldilocks.verl.update.driver_queue import DriverQueue

    return DriverQueue()


def sampling_trainer(_trainer: Any) -> Any:
    """Our V0 trainer, where verl's task runner has hardcoded its own."""
    from goldilocks.verl.compat.trainer import RayPPOTrainerWithSampling

    return RayPPOTrainerWithSampling
