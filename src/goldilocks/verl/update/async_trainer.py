"""verl's asynchronous V1 trainer with the collector in the place of its replay buffer: ``goldilocks_async``.

Rollout servers have devices of their own and generate while the trainer trains. When the trainer has new weights, verl
stops what the servers are writing, loads the weights, and lets it go on. So every rollout is as if it paused at each
update (``on_full: partial``), and the collector bounds how old a group may be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_separate_async import logger as verl_logger
from verl.utils.debug import marked_timer

from goldilocks.errors import require
from goldilocks.losses.log_probs import is_bypassed
from goldilocks.types import OnFull
from goldilocks.verl.dispatch.backend import NeverPausing
from goldilocks.verl.update.log_probs import gap_of_waiting_rows, has_fresh_token, log_prob_micro_batch
from goldilocks.verl.update.trainer import CollectorTrainer

ENGINE = "goldilocks.engine.verl_server.ray_weights"  # registers the checkpoint engine ``ray``


@register_trainer("goldilocks_async")
class GoldilocksAsyncTrainer(CollectorTrainer, PPOTrainerSeparateAsync):
    """``CollectorTrainer`` on devices of its own, beside rollout servers on theirs."""

    backend_class = NeverPausing

    def __init__(self, config: DictConfig) -> None:
        prepare(config)
        super().__init__(config)

    def _setup(self) -> None:
        """verl 0.9.1 passes ``flush`` to a logger here, which raises unless the logger drops the line."""
        level = verl_logger.level
        verl_logger.setLevel(logging.WARNING)
        super()._setup()
        verl_logger.setLevel(level)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.collector.ahead = self.collector.target_groups  # the servers have work while the trainer trains

    def on_train_begin(self) -> None:
        """Do nothing: verl would fetch prompts ahead, and here the collector issues them."""

    def on_validate_begin(self) -> None:
        """Do nothing: the servers that generate validate too.

        Some verl has servers on the trainer's devices as well. It would wake those here, and put them to sleep again
        while rollouts go on.
        """

    def _log_probs(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """The log-probs of the policy that is trained. verl keeps a copy for several updates per batch; here is one."""
        with self._tensors_only(batch):
            return PPOTrainer._compute_old_log_prob(self, batch, metrics)

    def _gap_before_update(self, batch: KVBatchMeta, correction: Any) -> float | None:
        """Where the newest weights wrote nothing in the batch, the gap of rows that they have written since."""
        gap = super()._gap_before_update(batch, correction)
        known = gap is not None or has_fresh_token(batch, self._policy) or is_bypassed(correction)
        if known or not self.weights_guard.judges:
            return gap
        backend = self.replay_buffer.backend
        self.driver.observe(backend.events(0))
        waiting = backend.rows.waiting(but=set(batch.keys))
        multiple = self._ranks * log_prob_micro_batch(self.config)
        return gap_of_waiting_rows(
            waiting, self._policy, multiple, self._computed_with, lambda rows: self._log_probs(rows, {})
        )

    @contextmanager
    def _refilling(self) -> Iterator[None]:
        """Wait for more groups; the servers never stopped."""
        with marked_timer("gen", self.timing_raw):
            yield


def prepare(config: DictConfig) -> None:
    """Check what verl's trainer needs, and set what follows from it."""
    rollout, groups = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    require(rollout.nnodes > 0, "actor_rollout_ref.rollout.nnodes", rollout.nnodes, _with("1 or more: servers' own"))
    engine = rollout.checkpoint_engine
    require(
        engine.backend != "naive",
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
        engine.backend,
        _with("ray (any machine), nccl (GPUs) or another of verl's between devices"),
    )
    lent, ahead = (f"trainer.v1.separate_async.{key}" for key in ("hybrid_rollout.enable_switch", "num_warmup_batches"))
    require(not OmegaConf.select(config, lent), lent, True, _with("False: the trainer's devices do not generate"))
    batches = OmegaConf.select(config, ahead)
    require(batches in (None, 1), ahead, batches, _with("1: the groups of one batch are begun ahead"))
    on_full = groups.get("on_full", OnFull.PARTIAL)
    accepted = _with("partial, or left out: generation never pauses")
    require(on_full in (OnFull.PARTIAL, OnFull.FINISH), "algorithm.filter_groups.on_full", on_full, accepted)
    with open_dict(config):
        # verl 0.9.1 sends the base weights alone where an adapter is not merged: the servers would never see it.
        config.actor_rollout_ref.model.lora.merge = True
        groups.on_full = str(OnFull.PARTIAL)
        config.actor_rollout_ref.hybrid_engine = False
        updates: Any = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        config.trainer.v1.separate_async.parameter_sync_step = updates
        if engine.backend == "ray":
            engine.custom_backend_module = ENGINE


def _with(accepted: str) -> str:
    return f"{accepted}, with trainer.v1.trainer_mode=goldilocks_async"
