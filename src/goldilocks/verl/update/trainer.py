"""verl's V1 trainers with the collector in the place of their replay buffer; the synchronous one is ``goldilocks``.

With everything off it trains what verl's ``sync`` trains, prompt for prompt. The training loop is verl's; the methods
that its steps call are overridden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from goldilocks.config.settings import Settings
from goldilocks.drive.driver import Driver
from goldilocks.errors import require
from goldilocks.losses.advantages import (
    POOLED,
    SUFFIX,
    normalised_by_config,
    pool_estimator,
    pooled,
    rows_of_rollouts,
    untrained_rollouts,
    whitened,
)
from goldilocks.rewards.calls import guard_if_asked
from goldilocks.runs.loggers import logged_before, show_grouped
from goldilocks.types import Group, part_of_row, split_row_key
from goldilocks.verl.checks import MANAGER, check_v1, estimator_for
from goldilocks.verl.dispatch.backend import AgentLoops
from goldilocks.verl.driven import Driven, UpdatesPerEpoch, changed
from goldilocks.verl.patch import GAP_SUM, GAP_TOKENS
from goldilocks.verl.plugin import in_force
from goldilocks.verl.store import (
    PARTITION,
    batch_of,
    clear,
    fill_log_probs,
    fill_with_zeros,
    padding_keys,
    tensor_fields,
    untrained_of,
)
from goldilocks.verl.update.gates import build_gate
from goldilocks.verl.update.log_probs import (
    OnePass,
    gap_of_rows,
    log_prob_micro_batch,
    reference_micro_batch,
    taken_mean,
    update_micro_batch,
    use_behaviour_log_probs,
    weights_guard,
)

if TYPE_CHECKING:
    Base = PPOTrainerSync
else:
    Base = object

POLL_INTERVAL = 0.05  # seconds; validation waits on verl's own replay buffer
MULTI_MODAL = ("multi_modal_inputs",)


# Estimators over all rollouts seen, for groups of which only a part is trained: ``<name>_pool``.
GRPO = get_adv_estimator_fn("grpo")
# verl whitens these advantages token by token: GRPO's, without its own scale.
OF_ROLLOUTS = {"reinforce_plus_plus_baseline": whitened(partial(GRPO, norm_adv_by_std_in_grpo=False))}
for name in POOLED:
    estimator = normalised_by_config(GRPO) if name == "grpo" else get_adv_estimator_fn(name)
    register_adv_est(name + SUFFIX)(pooled(estimator, OF_ROLLOUTS.get(name)))


class DriverSampler(ReplayBuffer):
    """verl's replay buffer for validation; for training it returns the batch that the driver takes."""

    driver: Driver
    backend: AgentLoops

    def __init__(self, config: Any) -> None:
        sampler = config.trainer.v1.sampler
        super().__init__(
            trainer_mode="sync",
            trainer_config=OmegaConf.create(),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            poll_interval=POLL_INTERVAL,
        )

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        if partition_id != PARTITION:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        self.backend.global_steps = global_steps
        return batch_of(self.driver.take()), {**self.backend.manager.metrics(), **self.driver.watch.read()}


class CollectorTrainer(Driven, Base):
    """Mixed into one of verl's trainers: a ``Collector`` decides which prompts are rolled out, how often, and which
    groups are trained."""

    replay_buffer: DriverSampler
    backend_class = AgentLoops

    def __init__(self, config: DictConfig) -> None:
        self.settings = Settings.from_config(config)
        check_v1(config)
        guard_if_asked(config)
        with open_dict(config):
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = MANAGER
            if self.settings.trains_older_groups:  # against the log-probs that the rollout engine returns
                config.actor_rollout_ref.rollout.calculate_log_probs = True
        self.weights_guard = weights_guard(config, self.settings.policies.on_stale_weights)
        config.algorithm.adv_estimator = estimator_for(self.settings)
        self._logged_before = logged_before(config.trainer)
        super().__init__(config)

    @property
    def trainer_mode(self) -> str:
        """verl takes its synchronous branches where this is ``sync``."""
        return "sync"

    @trainer_mode.setter
    def trainer_mode(self, name: str) -> None:
        pass

    @property
    def logger(self) -> Any:
        """verl's ``Tracking``, which ``fit`` makes."""
        return self._tracking

    @logger.setter
    def logger(self, tracking: Any) -> None:
        self._tracking = tracking
        if "file" in tracking.logger:
            tracking.logger["file"].fp.write(self._logged_before)
        show_grouped(tracking.logger, self.config.trainer.default_local_dir)

    def _build_replay_buffer(self) -> DriverSampler:
        return DriverSampler(self.config)

    def _init_dataloader(self) -> None:
        gen_batch_size = self.config.data.get("gen_batch_size", None)
        super()._init_dataloader()
        with open_dict(self.config):
            self.config.data.gen_batch_size = gen_batch_size  # verl sets it to 1 where groups are filtered
        self._collect()
        self.steps_per_epoch = UpdatesPerEpoch(self.config.trainer, self.collector)
        backend = self.backend_class(self.config, self.train_dataset, self._refilling)
        self.replay_buffer.backend = backend
        backend.check_several_rows = lambda: several_rows_estimator(self.config.algorithm)  # before a batch is full
        kind, coefficient = self.config.algorithm.kl_penalty, lambda: self.kl_ctrl_in_reward.value
        gate = build_gate(self.settings, kind, coefficient, lambda: self._policy, self._prepare)
        budget, epochs = self.settings.budget(), self.steps_per_epoch
        self.driver = Driver(self.collector, backend, backend.rows, gate, budget=budget, epochs=epochs)
        self.replay_buffer.driver = self.driver
        mini_batches = self._mini_batches(self.config.actor_rollout_ref.actor)
        patched = in_force("one-pass")
        self.one_pass = OnePass.of(self.config, mini_batches=mini_batches, gate=gate is not None, patched=patched)

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop; the backend is given the workers it asks."""
        self.replay_buffer.backend.manager = agent_loop_manager
        self._end_with_this_update({})  # a run that is started again may have nothing left to do
        super().fit(agent_loop_manager)
        print(self.driver.closing(), flush=True)

    # -- a step --------------------------------------------------------------------------------------------------------

    def prepare_step(self) -> dict[str, float]:
        """Do nothing: the collector issues prompts as rollouts arrive."""
        return {}

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        with self._keeping_what_was_generated():
            return super()._step_once(metrics, timing_raw, sample_batch_size)

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        metrics.update(self.driver.metrics())  # after the save, which takes in what has arrived since the batch
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        self.replay_buffer.backend.rows.leave(batch.keys)  # verl clears them next

    # -- an end ------------------------------------------------------------------------------------------------------

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self.driver.meter.begin_update()

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        self._end_with_this_update(metrics)
        return batch

    def on_step_end(self) -> None:
        super().on_step_end()
        self.driver.meter.end_update()

    def _end_with_this_update(self, metrics: dict) -> None:
        if self._end_if_over(metrics):
            self.total_training_steps = self.global_steps

    # -- rejection inside the refill loop ------------------------------------------------------------------------------

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Compute them where something reads them before the update. With a gate, return a batch that passes it."""
        if self.one_pass.own_log_probs:
            return batch
        batch = self._log_probs(batch, metrics)
        if self.driver.gate is None:
            return batch
        if self.settings.judges_final_reward:
            self._ref_log_probs(batch, metrics)
        self._prepared, self._padding = set(batch.keys), set(padding_keys(batch))
        final = self._balanced(self.driver.settle(), metrics)
        reference = ["ref_log_prob"] if self.settings.judges_final_reward else []
        fill_log_probs(padding_keys(final), 0.0, "entropy", *reference)
        clear(self._padding)
        return final

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Compute them, unless a gate on the final reward has read them already."""
        return batch if self.settings.judges_final_reward else self._ref_log_probs(batch, metrics)

    def _prepare(self, groups: Sequence[Group]) -> None:
        """Compute the log-probs of groups that replace rejected ones; those of the batch that was taken have theirs."""
        if self._prepared.issuperset(batch_of(groups).keys):
            return
        batch = self._balanced(groups, {})
        self._padding |= set(padding_keys(batch))
        self._log_probs(batch, {})
        if self.settings.judges_final_reward:
            self._ref_log_probs(batch, {})

    @property
    def _policy(self) -> int:
        """The version of the policy that is being trained, in updates."""
        return int(self.global_steps) - 1

    @contextmanager
    def _refilling(self) -> Iterator[None]:
        """Wake the rollout servers with the same policy, so that more groups can be generated."""
        with marked_timer("gen", self.timing_raw):
            self.checkpoint_manager.update_weights(self.global_steps - 1)
            yield
            self.on_sample_end()

    def _balanced(self, groups: Iterable[Group], metrics: dict) -> KVBatchMeta:
        """The rows of these groups, padded and ordered as verl divides a batch among the workers."""
        batch = self._balance_batch(batch_of(groups), metrics)
        batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return batch

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Divide a batch among the ranks. For one, too, verl would search for the best way: 0.2 s for 512 rows."""
        if self._ranks > 1:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        multiple = self._get_required_batch_multiple(1)
        batch = upsample_batch_to_divisible_size(batch, multiple, self.tokenizer.eos_token_id)
        lengths = [tag["seq_len"] for tag in batch.tags]
        metrics.update(log_seqlen_unbalance(lengths, [list(range(len(lengths)))], "global_seqlen"))
        return batch

    # -- what the workers are sent -------------------------------------------------------------------------------------

    def _log_probs(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._tensors_only(batch):
            return super()._compute_old_log_prob(batch, metrics)

    def _ref_log_probs(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._tensors_only(batch):
            return super()._compute_ref_log_prob(batch, metrics)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._tensors_only(batch):
            return super()._compute_values(batch, metrics)

    @contextmanager
    def _tensors_only(self, batch: KVBatchMeta) -> Iterator[None]:
        """Within it workers are sent the tensors of these rows: the texts of a row take longer to send.

        Where the model has a processor, the inputs of other modalities, which are no tensors, are sent too.
        """
        before, batch.fields = batch.fields, self._computed_with(batch)
        try:
            yield
        finally:
            batch.fields = before

    def _computed_with(self, batch: KVBatchMeta) -> list[str]:
        return tensor_fields(batch, also=MULTI_MODAL if self.processor else ())

    # -- advantages ----------------------------------------------------------------------------------------------------

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Compute advantages with baselines over all rollouts of a group, whether or not all are trained."""
        algorithm, others = self.config.algorithm, untrained_of(self.collector.in_hand)
        backfilled = self.collector.backfilled
        spare = [key for key in batch.keys if split_row_key(key)[0] in backfilled]
        if self.collector.trained:  # verl needs a token that is not masked
            fill_with_zeros(spare, "response_mask")
        with (
            # verl would compare ``old_log_probs``, which are not there yet, with the engine's for its metrics
            changed(algorithm, rollout_correction=None) if self.one_pass.own_log_probs else nullcontext(),
            counting_rollouts(algorithm, batch.keys),
            untrained_rollouts(others) if others else nullcontext(),
        ):
            batch = super()._compute_advantage(batch, metrics)
        fill_with_zeros(spare, "advantages")
        return batch

    # -- groups of different sizes -------------------------------------------------------------------------------------

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """The number that a batch must be a multiple of: a rank's share of every pass is whole micro-batches."""
        updates = self._mini_batches(self.config.actor_rollout_ref.actor)
        parts = [updates * update_micro_batch(self.config), log_prob_micro_batch(self.config)]
        if self.use_reference_policy:
            parts.append(reference_micro_batch(self.config))
        if self.use_critic:
            parts.append(self._mini_batches(self.config.critic))
        return dp_size * math.lcm(*parts)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Update on the rows that add to the gradient; the others are counted in the loss and not computed."""
        correction = self.config.algorithm.get("rollout_correction", None)
        gap = self._gap_before_update(batch, correction)
        metrics.update(use_behaviour_log_probs(batch, self._policy, correction, own=self.one_pass.own_log_probs))
        part = self.one_pass.rows(batch, self._ranks, update_micro_batch(self.config))
        with self._rows_per_mini_batch(self.config.actor_rollout_ref.actor, len(part)), self._tensors_only(part):
            super()._update_actor(part, metrics)
        measured = taken_mean(metrics, GAP_SUM, GAP_TOKENS)
        metrics.update(self.weights_guard.observe(gap if measured is None else measured))
        metrics.update(self.one_pass.metrics(part, metrics))
        return batch

    def _gap_before_update(self, batch: KVBatchMeta, correction: Any) -> float | None:
        """Return the mean gap to the rollout engine's log-probs; None where the update itself measures it."""
        return None if self.one_pass.own_log_probs else gap_of_rows(batch, self._policy, correction)

    @property
    def _ranks(self) -> int:
        """The data-parallel ranks of the actor, among which a batch is divided evenly."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:  # verl asks when it divides its first batch
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return max(group._dispatch_info["actor"]) + 1

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._rows_per_mini_batch(self.config.critic, len(batch)), self._tensors_only(batch):
            return super()._update_critic(batch, metrics)

    @contextmanager
    def _rows_per_mini_batch(self, section: DictConfig, rows: int) -> Iterator[None]:
        """Within it verl cuts mini-batches by rows. By itself it cuts by prompts times ``rollout.n``."""
        size = rows // self._mini_batches(section)
        with changed(self.config.actor_rollout_ref.rollout, n=1), changed(section, ppo_mini_batch_size=size):
            yield


@contextmanager
def counting_rollouts(algorithm: Any, keys: Sequence[str]) -> Iterator[None]:
    """Have the advantages of these rows computed over rollouts; ``algorithm`` is that section of verl's config.

    verl's own ``grpo`` does so. Other estimators of verl take each row for a rollout, so where a rollout has several
    rows, the pool's estimator stands in: its values are the same for rollouts of one row.
    """
    if not any(map(part_of_row, keys)):
        yield
        return
    rows = [(split_row_key(key), part_of_row(key)) for key in keys]
    with changed(algorithm, adv_estimator=several_rows_estimator(algorithm)), rows_of_rollouts(rows):
        yield


def several_rows_estimator(algorithm: Any) -> str:
    """Return the estimator for rollouts of several rows; raise ``ValueError`` if this config has none for them.

    It would read a KL penalty in the reward in the last rows alone.
    """
    name: str = algorithm.adv_estimator
    accepted = (
        f"False with algorithm.adv_estimator={name} where rollouts have several rows: the reward of a rollout is that "
        "of its last row, without the penalty of the others. Use actor_rollout_ref.actor.use_kl_loss=True"
    )
    whole = not algorithm.use_kl_in_reward or name.removesuffix(SUFFIX) not in POOLED
    require(whole, "algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, accepted)
    return name if name == "grpo" else pool_estimator(name, use_kl_in_reward=False)


@register_trainer("goldilocks")
class GoldilocksTrainer(CollectorTrainer, PPOTrainerSync):
    """Servers and trainer take turns on the same devices."""
