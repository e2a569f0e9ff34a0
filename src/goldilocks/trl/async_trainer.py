"""TRL's ``AsyncGRPOTrainer`` with the collector between its rollout worker and its batches.

The server generates while the trainer trains, so nothing pauses. The collector asks for each rollout, and the age of a
group bounds what is trained (``filter_groups.max_carry_steps``) where TRL drops samples of its queue
(``max_staleness``). Micro-batches, loss and weight transfer are TRL's.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import requests
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, async_rollout_worker

from goldilocks.config.sections import Policies
from goldilocks.config.settings import Settings
from goldilocks.drive.driver import Driver
from goldilocks.drive.rehearsal import rehearse
from goldilocks.errors import require, require_type
from goldilocks.trl import async_rollouts
from goldilocks.trl.collection import Processes, WrittenFor, having, warn_of_changes
from goldilocks.trl.on_disk import BudgetCallback, RunRecord, WholeCheckpoints, add_logged
from goldilocks.trl.rows import DatasetPrompts, Section, Sections
from goldilocks.types import OnFull

TIMEOUT_S = 60.0  # of a question to the server
HERE = "on TRL's asynchronous trainer"
VERSION = "1.16"
# TRL's asynchronous trainer is experimental. These are the sources that ours was written for.
WRITTEN_FOR: WrittenFor = [
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


class GoldilocksAsyncGRPOTrainer(WholeCheckpoints, AsyncGRPOTrainer):  # type: ignore[misc]
    """``AsyncGRPOTrainer`` and, if asked for, dynamic sampling, adaptive rollouts and selectors.

    The sections are those of ``GoldilocksGRPOTrainer``. Without any of them this is TRL's trainer, which
    goes on beside a server that holds adapters of an earlier run.
    """

    collected: async_rollouts.CollectedQueue | None = None  # on the first process
    rollout_worker: Any  # TRL's own, which has no types
    model_version: int
    _trained_groups: set[int]

    def __init__(
        self,
        *args: Any,
        filter_groups: Section | None = None,
        adaptive_rollout: Section | None = None,
        goldilocks: Section | None = None,
        batch_filter: Section | None = None,
        gen_batch_size: int | None = None,
        run_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        sections = Sections(filter_groups, adaptive_rollout, goldilocks, batch_filter, gen_batch_size)
        if sections.given:
            warn_of_changes(WRITTEN_FOR, VERSION)
            check(sections, kwargs)
        super().__init__(*args, **kwargs)
        self._collects = sections.given
        if sections.given:
            self._collect(sections, Path(run_dir or self.args.output_dir))

    def _collect(self, sections: Sections, run_dir: Path) -> None:
        sizes = _sizes(self.args, self.accelerator.num_processes)
        sections = _asynchronous(sections, self.args)
        settings = Settings.from_config(sections.config(sizes))
        processes = self._processes = Processes(self.accelerator)
        if processes.first:
            prompts = DatasetPrompts(self.train_dataset)
            require(prompts.images is None, "train_dataset", prompts.images, f"no images {HERE}")
            self.collected = self._queue(settings, prompts)
        meter = None if self.collected is None else self.collected.driver.meter
        self._budget = BudgetCallback(settings.budget(), meter, processes)
        self.add_callback(self._budget)
        if self.collected is not None:
            closing = self.collected.driver.closing
            self._record = RunRecord(run_dir, sections.config(sizes), self._budget.metrics, closing)
            self.collected.on_batch = self._record.take
            self.add_callback(self._record)

    def _queue(self, settings: Settings, prompts: DatasetPrompts) -> async_rollouts.CollectedQueue:
        print(settings.summary(), flush=True)
        rehearse(settings, prompts)
        rows, micro_batches, args = async_rollouts.SampleRows(), async_rollouts.MicroBatches(), self.args
        worker = async_rollouts.AskedWorker(**self.rollout_worker._loop_kwargs)
        backend = async_rollouts.AskedRollouts(worker, rows, seed=args.seed, stale_after_s=args.heartbeat_stale_after_s)
        collector = settings.collector(prompts, lambda epoch: np.arange(len(prompts)))  # TRL's order
        collector.ahead = collector.target_groups  # the server has work while the trainer trains
        driver = Driver(collector, backend, rows, budget=settings.budget())
        found = async_rollouts.CollectedQueue(driver, rows, micro_batches)
        worker.policy = lambda: found.next_batch
        self.rollout_worker, self.rollout_queue, self._trained_groups = worker, found, micro_batches
        return found

    def get_train_dataloader(self) -> Any:
        """TRL's; no sample of a batch is dropped for its age, which the collector has bounded."""
        if not self._collects:
            return super().get_train_dataloader()
        with having(self.args, max_staleness=sys.maxsize):
            found = super().get_train_dataloader()
        if self.collected is not None:
            batches = found.dataset  # TRL's, which takes samples from a data set of its own
            batches.dataset = async_rollouts.UntilExhausted(batches.dataset, self.collected)
            if self.args.token_budget > 0:  # TRL has asked the server if it was None
                self.collected.longest = self.args.token_budget
        self._loader = found
        return found

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> Any:
        """TRL's; an update begins with the wait for its samples. An update that lacks some is not made."""
        if not self._collects:
            return super().get_batch_samples(epoch_iterator, num_batches, *args)
        self._budget.begin()
        try:
            found = super().get_batch_samples(epoch_iterator, num_batches, *args)
        except Exception:
            if not getattr(self._loader, "_stop_iteration", False):  # accelerate's word, the same on every process
                raise
            found = [], None  # accelerate stumbles over a loader that ends before its first batch
        if len(found[0]) < num_batches:
            why = self._processes.decided(lambda: str(self.collected and self.collected.exhausted))
            raise self._save_unfinished(why)
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; the batches up to the one that is being trained show their metrics."""
        if self.collected is not None:
            for metrics in self._record.trains(self.collected.next_batch + 1):
                add_logged(self._metrics["train"], metrics, self._metrics["train"])
        loss = super().training_step(*args, **kwargs)
        if self.collected is not None:
            self.collected.trained_micro_batch()
        return loss

    def _sync_weight_lora(self, t0: float) -> Any:
        """TRL's, under a name that the server does not hold: it refuses a second adapter of the same name.

        An earlier run may have left adapters there: one that is done, or the part of this one behind its checkpoint.
        """
        if self.vllm_client is not None:  # on the first process
            models = requests.get(f"{self.vllm_client.server_url}/v1/models", timeout=TIMEOUT_S).json()["data"]
            found = (re.fullmatch(rf"{re.escape(self._lora_name)}-v(\d+)", one["id"]) for one in models)
            self.model_version = max([self.model_version, *(int(match[1]) for match in found if match)])
        return super()._sync_weight_lora(t0)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's; a group whose samples a run that goes on trains does not count as trained. TRL collates ahead."""
        waiting = set() if self.collected is None else self.collected.waiting
        with having(self, _trained_groups=self._trained_groups - waiting):
            super()._save_checkpoint(model, trial)

    def _save_collected(self, folder: Path) -> None:
        if self.collected is not None:
            self.collected.save(folder)

    def _load_collected(self, folder: Path) -> None:
        if self.collected is not None:
            self.collected.load(folder)


def check(sections: Sections, given: dict[str, Any]) -> None:
    """Refuse what the collector cannot do here, before a model is loaded."""
    for key in ("rollout_worker", "environment_factory"):
        require(given.get(key) is None, key, given.get(key), f"none with a section {HERE}")
    judged = bool((sections.batch_filter or {}).get("enable"))
    require(not judged, "batch_filter.enable", judged, f"False {HERE}")
    columns = (sections.goldilocks or {}).get("validate_by")
    require(not columns, "goldilocks.validate_by", columns, f"none {HERE}")
    on_stale = (sections.goldilocks or {}).get("on_stale_weights", Policies.on_stale_weights)
    accepted = f"{Policies.on_stale_weights}, or left out, {HERE}, where nothing compares the server's weights"
    require(on_stale == Policies.on_stale_weights, "goldilocks.on_stale_weights", on_stale, accepted)
    sections.refuse_rewards()
    on_full = (sections.filter_groups or {}).get("on_full", OnFull.PARTIAL)
    accepted = f"partial, or left out, {HERE}: generation never pauses"
    require(on_full == OnFull.PARTIAL, "filter_groups.on_full", on_full, accepted)


def _asynchronous(sections: Sections, args: Any) -> Sections:
    """Return the sections with what follows from a server that never stops, and from TRL's arguments."""
    own = dict(sections.filter_groups or {})
    accepted = f"1 or more {HERE}, where generation never pauses, unless filter_groups.max_carry_steps is given"
    require("max_carry_steps" in own or args.max_staleness >= 1, "max_staleness", args.max_staleness, accepted)
    shown = args.log_completions
    require(not shown, "log_completions", shown, f"False {HERE}; the run's folder has every rollout in rollouts/")
    accepted = f"1024, or left out, {HERE}, where gen_batch_size bounds what is open"
    require(args.queue_maxsize == 1024, "queue_maxsize", args.queue_maxsize, accepted)
    filtered = {"max_carry_steps": args.max_staleness, **own, "on_full": str(OnFull.PARTIAL)}
    require_type("filter_groups.max_carry_steps", filtered["max_carry_steps"], int)
    most = max(filtered["max_carry_steps"], 1)
    accepted = f"at most {most}, filter_groups.max_carry_steps: the newest answers there are would be older"
    require(args.weight_sync_steps <= most, "weight_sync_steps", args.weight_sync_steps, accepted)
    ahead = sections.gen_batch_size or max(1, args.max_inflight_tasks // args.num_generations)
    return replace(sections, filter_groups=filtered, gen_batch_size=ahead)


def _sizes(args: Any, processes: int) -> Any:
    """Return the arguments as ``Sections`` reads them: a batch is the samples of one update."""
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    key = "per_device_train_batch_size × gradient_accumulation_steps × processes"
    require(samples % args.num_generations == 0, key, samples, f"a multiple of num_generations={args.num_generations}")
    return SimpleNamespace(**{**vars(args), "generation_batch_size": samples})
