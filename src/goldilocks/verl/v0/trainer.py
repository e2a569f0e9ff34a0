"""``RayPPOTrainerWithSampling``: verl's V0 trainer with dynamic sampling and adaptive rollouts.

The training loop is verl's ``fit``, unchanged: generation is where it generates, and the batch it gets is the one the
collector takes. Every decision is ``goldilocks.core``'s. verl's V1 trainer does the same without waiting for the
slowest rollout of a round (``trainer.v1.trainer_mode=goldilocks``); this one is for code that is built on V0.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Subset
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.dataset.rl_dataset import collate_fn as verl_collate_fn
from verl.utils.fs import copy_to_local
from verl.utils.model import get_generation_config

from goldilocks.config.settings import Settings
from goldilocks.drive.driver import Driver
from goldilocks.drive.gate import Gate
from goldilocks.engine.cpu import patches_env
from goldilocks.engine.engine import end_ids
from goldilocks.errors import require
from goldilocks.losses.log_probs import behaviour_log_probs, gap_sums, is_bypassed, mean_gap
from goldilocks.rewards.calls import guard_if_asked
from goldilocks.runs.files import set_aside
from goldilocks.runs.loggers import log_file
from goldilocks.types import Group
from goldilocks.verl.checks import check_v0
from goldilocks.verl.driven import Driven, UpdatesPerEpoch, changed
from goldilocks.verl.update.log_probs import (
    log_prob_micro_batch,
    reference_micro_batch,
    update_micro_batch,
    weights_guard,
)
from goldilocks.verl.v0.backend import (
    MARK,
    STALE,
    TRAINED,
    BatchFilter,
    CollectingManager,
    FinalReward,
    GenerationBatches,
    Pending,
    ProtoRows,
    pad_to,
    placeholder,
)
from goldilocks.verl.v0.python_config import TrainerConfig, name_targets
from goldilocks.verl.v0.rewards import RewardFunction, mark_validation, route


class RayPPOTrainerWithSampling(Driven, RayPPOTrainer):
    """verl's ``RayPPOTrainer``: the same arguments, and ``reward_fn`` and ``val_reward_fn`` as functions.

    ``config`` is verl's, or a ``TrainerConfig``. ``fit`` starts Ray and the workers if that has not been done.
    """

    checkpoint_manager: Any
    over: bool  # whether the last update was the run's last, decided where ``fit`` can still be asked to save it

    def __init__(
        self,
        config: DictConfig | TrainerConfig,
        tokenizer: Any,
        role_worker_mapping: Any,
        resource_pool_manager: Any,
        *args: Any,
        reward_fn: RewardFunction | None = None,
        val_reward_fn: RewardFunction | None = None,
        **kwargs: Any,
    ) -> None:
        documented = isinstance(config, TrainerConfig)
        config = config.to_verl() if isinstance(config, TrainerConfig) else copy.deepcopy(config)
        OmegaConf.resolve(config)
        name_targets(config)
        if documented and kwargs.get("val_dataset") is None and not config.data.val_files:
            data: Any = kwargs.get("train_dataset")
            require(data is not None, "data.val_files", None, "files, or val_dataset, or train_dataset without either")
            config.trainer.val_before_train, config.trainer.test_freq = False, -1
            kwargs["val_dataset"] = Subset(data, [0])  # verl requires one; it is never used
        self.settings = Settings.from_config(config)
        check_v0(config, self.settings)
        if self.settings.trains_older_groups:
            config.actor_rollout_ref.rollout.calculate_log_probs = True
        self.weights_guard = weights_guard(config, self.settings.policies.on_stale_weights)
        self._routed = route(config, reward_fn, val_reward_fn)
        guard_if_asked(config)
        self.rows = ProtoRows()
        super().__init__(config, tokenizer, role_worker_mapping, resource_pool_manager, *args, **kwargs)

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        """Create verl's data loaders, for validation and the number of updates; the collector chooses prompts."""
        with changed(self.config.data, gen_batch_size=None):
            super()._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self._collate = collate_fn or verl_collate_fn
        self._collect()
        self.train_dataloader = _Placeholders(self)

    def init_workers(self) -> None:
        """Start verl's workers, and put the driver before their rollout manager."""
        super().init_workers()
        manager, collector = self.async_rollout_manager, self.collector
        model = self.config.actor_rollout_ref.model
        folder = copy_to_local(model.get("hf_config_path") or model.path)
        ends = end_ids(self.tokenizer, get_generation_config(folder, model.get("trust_remote_code", False)))
        backend = GenerationBatches(manager, collector, self.rows, self._prompts, super()._get_gen_batch, ends)
        budget, epochs = self.settings.budget(), UpdatesPerEpoch(self.config.trainer, collector)
        self.driver = Driver(collector, backend, self.rows, self._gate(), budget=budget, epochs=epochs)
        self.async_rollout_manager = CollectingManager(manager, self.driver, backend, self.rows)

    def _gate(self) -> Gate | None:
        settings = self.settings
        if settings.gate_config is not None:
            return BatchFilter(settings.gate_config, settings.seed, self._rows_of, self._with_log_probs)
        if settings.judges_final_reward:
            kind, min_std = self.config.algorithm.kl_penalty, settings.filter_groups.min_std

            def tensors(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
                return self._with_log_probs(self._rows_of(groups), True)

            return FinalReward(kind, lambda: self.kl_ctrl_in_reward.value, min_std, tensors)
        return None

    def fit(self) -> None:
        if not ray.is_initialized():
            from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

            given, theirs = self.config.ray_kwargs.get("ray_init", {}), get_ppo_ray_runtime_env(self.config)
            runtime_env = OmegaConf.merge(theirs, {"env_vars": patches_env()}, given.get("runtime_env", {}))
            arguments: Any = OmegaConf.to_container(OmegaConf.create({**given, "runtime_env": runtime_env}))
            ray.init(**arguments)
        if not hasattr(self, "async_rollout_manager"):
            self.init_workers()
        trainer, rollout = self.config.trainer, self.config.actor_rollout_ref.rollout
        if "file" in trainer.logger:
            set_aside(log_file(trainer))  # verl opens it anew
        kept = {key: trainer[key] for key in ("balance_batch", "total_epochs", "test_freq", "save_freq")}
        try:
            with changed(trainer, **kept), changed(rollout, n=rollout.n), self._keeping_what_was_generated():
                super().fit()
        except _Over:  # what ``fit`` does after an update that it knew to be the last
            if hasattr(self.actor_rollout_wg, "async_calls_finalize_fn_exec"):
                self.actor_rollout_wg.async_calls_finalize_fn_exec(blocking=True)  # Megatron may still be saving
            self._shutdown_dump_executor()
        print(self.driver.closing(), flush=True)

    def _load_checkpoint(self) -> None:
        """Change what ``fit`` reads from here on, too; its loggers already have the user's config."""
        super()._load_checkpoint()
        trainer = self.config.trainer
        self._balances = trainer.balance_batch
        trainer.balance_batch = True  # called once a step with the metrics of fit
        trainer.total_epochs = sys.maxsize  # epochs end with the prompts issued
        self.config.actor_rollout_ref.rollout.n = 1  # each rollout is a row of its own
        self.train_dataloader = _Placeholders(self)
        self.over = self.driver.over  # a run that is started again may have nothing left to do

    # -- a batch -------------------------------------------------------------------------------------------------------

    def _prompts(self, indices: Sequence[int]) -> DataProto:
        batch = DataProto.from_single_dict(self._collate([self.train_dataset[index] for index in indices]))
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return batch

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        if MARK in batch.non_tensor_batch:
            return Pending(batch)
        generation = super()._get_gen_batch(batch)
        if self._routed:
            mark_validation(generation)
        return generation

    def _rows_of(self, groups: Sequence[Group]) -> DataProto:
        return self.rows.of_batch(groups, self.collector.step)

    def _with_log_probs(self, batch: DataProto, reference: bool) -> dict[str, torch.Tensor]:
        """Return the rows' tensors with log-probs, which a gate needs before the batch is full: replicas sleep."""
        self.checkpoint_manager.sleep_replicas()
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        found = {**batch.batch, **self._compute_old_log_prob(batch)[0].batch}
        if reference:
            found |= self._compute_ref_log_prob(batch).batch
        self.checkpoint_manager.update_weights(self.global_steps - 1)  # the same ones: it is how replicas are woken
        return found

    # -- groups of different sizes -------------------------------------------------------------------------------------

    def _balance_batch(self, batch: DataProto, metrics: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Called by ``fit`` once a step, with its metrics; balances if the user asked for it."""
        metrics.update(self.driver.metrics())
        self._metrics = metrics
        if self.collector.trained:  # what only fills the batch up is not
            spare = np.isin(batch.non_tensor_batch["uid"], list(self.collector.backfilled))
            batch.batch["response_mask"][torch.from_numpy(spare)] = 0
        if not self._balances:
            return
        rows = len(batch)
        padded = pad_to(batch, self._ranks)
        padded.batch["__row__"] = torch.arange(len(padded))
        super()._balance_batch(padded, metrics, *args, **kwargs)
        order = padded.batch.pop("__row__")
        if padded is not batch:
            batch.reorder(order[order < rows])

    @property
    def _ranks(self) -> int:
        return self._get_dp_size(self.actor_rollout_wg, "actor")

    def _compute_values(self, batch: DataProto) -> DataProto:
        return super()._compute_values(pad_to(batch, self._ranks)).slice(0, len(batch))

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return super()._compute_ref_log_prob(self._padded(batch)).slice(0, len(batch))

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        log_probs, utilisation = super()._compute_old_log_prob(self._padded(batch))
        return log_probs.slice(0, len(batch)), utilisation

    def _padded(self, batch: DataProto) -> DataProto:
        """Pad the batch so that a rank's share of a pass for log-probs is whole micro-batches."""
        rows = math.lcm(log_prob_micro_batch(self.config), reference_micro_batch(self.config))
        return pad_to(batch, self._ranks * rows)

    def _update_actor(self, batch: DataProto) -> DataProto:
        """Train rows of older policies against the log-probs that were stored when they were written."""
        stale = torch.from_numpy(batch.non_tensor_batch[STALE] & batch.non_tensor_batch[TRAINED])
        correction = self.config.algorithm.get("rollout_correction", None)
        rows, gap = batch.batch, None
        if "rollout_log_probs" in rows and not is_bypassed(correction):  # of fresh rows, between trainer and engine
            written = torch.from_numpy(batch.non_tensor_batch[TRAINED] & ~batch.non_tensor_batch[STALE])
            fresh = rows["response_mask"].bool() & written.unsqueeze(-1)
            gap = mean_gap(gap_sums(rows["old_log_probs"], rows["rollout_log_probs"], fresh).tolist())
        if not self.collector.trained:  # the whole batch only fills up
            rows["advantages"] = torch.zeros_like(rows["advantages"])
        rows["old_log_probs"], metrics = behaviour_log_probs(rows, stale, correction)
        self._metrics.update(metrics)
        self._metrics.update(self.weights_guard.observe(gap))
        output = self._update(super()._update_actor, self.config.actor_rollout_ref.actor, batch)
        self.over = self._end_if_over(self._metrics)
        return output

    def _update_critic(self, batch: DataProto) -> DataProto:
        output = self._update(super()._update_critic, self.config.critic, batch)
        if self.config.trainer.critic_warmup > self.global_steps:  # the actor is not updated
            self.over = self._end_if_over(self._metrics)
            if self.over and self.config.trainer.save_freq > 0:  # ``fit`` saves only after an update of the actor
                self._save_checkpoint()
        return output

    def _update(self, update: Callable[[DataProto], DataProto], section: DictConfig, batch: DataProto) -> DataProto:
        """As many mini-batches as the user's sizes make of a training batch, of whole micro-batches."""
        mini_batches, trained = self._mini_batches(section), batch.non_tensor_batch[TRAINED]
        multiple = self._ranks * mini_batches * update_micro_batch(self.config)
        rows = pad_to(batch if trained.all() else batch.select_idxs(trained), multiple)
        with changed(section, ppo_mini_batch_size=len(rows) // mini_batches):
            return update(rows)

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        self.driver.meter.end_update()  # a budget of seconds is without validation
        return super()._validate(*args, **kwargs)


class _Over(Exception):
    """The run is over. ``fit`` knows its last update before it makes it, and has no other way out after it."""


class _Placeholders:
    """What ``fit`` iterates over: a placeholder a step, for as long as an epoch of prompts lasts.

    An epoch is a pass over the data in prompts issued. The driver says when the run is over.
    """

    def __init__(self, trainer: RayPPOTrainerWithSampling) -> None:
        self._trainer = trainer
        self._epoch = 0

    def __len__(self) -> int:
        """``fit`` starts at epoch ``steps // len``: at 0, from where epochs that are over pass at once."""
        return sys.maxsize

    def __iter__(self) -> Iterator[dict[str, Any]]:
        driver = self._trainer.driver
        epoch, self._epoch = self._epoch, self._epoch + 1
        while driver.epochs.current <= epoch:
            if self._trainer.over:
                raise _Over
            driver.meter.begin_update()
            yield placeholder()
            driver.meter.end_update()

    def state_dict(self) -> dict[str, Any]:
        """verl saves this; the collector's own state is saved beside it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is empty."""
