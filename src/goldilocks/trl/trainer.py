"""The collector in the place of the batches of a trainer of TRL's, whatever its algorithm.

What is overridden is all in this file and in ``goldilocks.trl.algorithms``, and only where the user gave a section: the
generation of a training batch, the rewards (they are read on their way), the loss's scale, and a checkpoint's beginning
and end.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goldilocks.config.sections import Policies
from goldilocks.config.settings import Settings
from goldilocks.core import Exhausted
from goldilocks.drive.backend import Rounds
from goldilocks.drive.driver import Driver
from goldilocks.drive.rehearsal import rehearse
from goldilocks.engine.cpu import avoid_cudnn
from goldilocks.engine.engine import is_truncated
from goldilocks.engine.reach import check_length
from goldilocks.errors import refuse, require
from goldilocks.losses.log_probs import WeightsGuard
from goldilocks.losses.policy_loss import TOKEN_LEVEL
from goldilocks.runs.history import by_column, check_values, column_and_value, metric_name, value_of
from goldilocks.trl import on_disk
from goldilocks.trl import rows as trl_rows
from goldilocks.trl.collection import SCALE, Collection, Processes, Rewards, Sizes, WrittenFor, having, warn_of_changes
from goldilocks.trl.engine_rollouts import EngineRollouts, Turns, check_adapters, is_adapted
from goldilocks.trl.rows import CompletionRow, CompletionRows, DatasetPrompts, Section, Sections, texts_alone
from goldilocks.types import hashed

logger = logging.getLogger(__name__)

NUMBERED = 64  # prompts of an evaluation whose rollouts are numbered together: its batches may have any size
ACCURACY = "acc"  # the reward function, of those there are, that says whether an answer is right


@dataclass(frozen=True)
class Scored:
    """What TRL passes to the reward functions, and the rewards of all processes."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    ids: Sequence[Sequence[int]]
    rewards: Tensor


class CollectedTrainer(on_disk.WholeCheckpoints):
    """A mixin for a trainer of TRL's: dynamic sampling, adaptive rollouts, selectors and the batch filter.

    ``filter_groups``, ``adaptive_rollout``, ``goldilocks`` and ``batch_filter`` are sections with the keys and defaults
    of docs/reference.md; ``gen_batch_size`` is how many prompts are chosen at a time (default: a batch of them,
    with ``sequential`` and ``max_carry_steps`` above 1 two). Without any of them this is TRL's trainer.
    ``engine_slots`` generates with Goldilocks' engine, so many rollouts at a time, in the place of ``model.generate``;
    ``only_signal`` computes no row whose advantage is zero, where the loss allows it and there is one process: the
    gradient is the same. ``eval_loss=False`` evaluates rewards alone. ``run_dir`` is where
    ``goldilocks report`` finds the run (default: ``output_dir``).
    """

    trl_versions: str  # that were tested
    written_for: WrittenFor  # what is overridden or called of TRL's trainer
    # Whether TRL returns sampled log-probs with the ids, and rows lack the log-probs of the policy that wrote them.
    _ratio_per_token: bool
    _rows_stand_alone: Any  # bool: whether a row without advantage has no part in the loss
    _mean_of_rows: Any  # bool: whether the policy's term of the loss is divided by the number of rows
    train_dataset: Any  # TRL's own, which has no types
    num_generations: int
    beta: Any  # the weight of the KL term
    _step: int
    _buffered_inputs: Any

    def __init__(
        self,
        *args: Any,
        filter_groups: Section | None = None,
        adaptive_rollout: Section | None = None,
        goldilocks: Section | None = None,
        batch_filter: Section | None = None,
        gen_batch_size: int | None = None,
        engine_slots: int | None = None,
        only_signal: bool = False,
        eval_loss: bool = True,
        run_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        self.collection: Collection | None = None
        self._scored: Scored | None = None
        self._seeds: list[int] | None = None  # of the round that is being generated
        self._turns: Turns | None = None  # of the conversations that are being generated
        self._tool_tokens: list[int] | None = None  # how many tools wrote into each answer that was generated last
        self._weights_guard: on_disk.WeightsGuardCallback | None = None
        self._in_loss: dict[str, Any] | None = None  # what the loss being computed is of, until its log-probs are known
        self._begun: tuple[int, Any] = 0, None  # micro-batches before this update, and the batch that had parts left
        self._validate_by: Sequence[str] = []
        self._validated = "eval"  # the name of the data set
        super().__init__(*args, **kwargs)
        self._engine = None if engine_slots is None else self._rollouts(engine_slots)
        alone = self.accelerator.num_processes == 1
        plain = not self.aux_loss_enabled and not self._sees_images  # a router's loss is over all rows
        self._only_signal = only_signal and alone and plain and self._rows_stand_alone
        self._eval_loss = eval_loss
        sections = Sections(filter_groups, adaptive_rollout, goldilocks, batch_filter, gen_batch_size)
        if sections.given or only_signal or self._engine is not None:
            avoid_cudnn()  # batches have any length, and rows of padding on their left
        if sections.given:
            warn_of_changes(self.written_for, self.trl_versions)
            self._collect(sections, Path(run_dir or self.args.output_dir))
        if self._engine is not None or self.args.use_vllm:
            action = (goldilocks or {}).get("on_stale_weights", Policies.on_stale_weights)
            exact, judges = on_disk.is_exact(self.args, self.model), on_disk.is_comparable(self.args, self.model)
            guard = WeightsGuard(action, exact=exact, judges=judges)
            self._weights_guard = on_disk.WeightsGuardCallback(guard, self.accelerator, self._metrics["train"])
            self.add_callback(self._weights_guard)

    def _collect(self, sections: Sections, run_dir: Path) -> None:
        settings = sections.settings(self.args)
        self._check_older_rows(settings)
        self._validate_by = settings.policies.validate_by
        several = isinstance(self.eval_dataset, dict) and len(self.eval_dataset) > 1
        accepted = "none with an eval_dataset of several sets: their accuracies would have one name"
        require(not (self._validate_by and several), "goldilocks.validate_by", self._validate_by, accepted)
        processes = Processes(self.accelerator)
        dataset = self._remove_unused_columns(self.train_dataset, "training")
        environments = getattr(self, "environment_factories", None) is not None  # RLOO has none
        rows, prompts = CompletionRows(), DatasetPrompts(dataset, environments=environments)
        parts, n = self.args.steps_per_generation, self.num_generations
        sizes = Sizes(n, parts, self._text_tokenizer.pad_token_id, self.pad_to_multiple_of)
        keeps = self._ratio_per_token and settings.trains_older_groups
        self.collection = Collection(prompts, rows, processes, sizes, keeps=keeps, seed=self.args.seed)
        driver = self._driver(settings, prompts, self.collection) if processes.first else None
        self.collection.driver = driver
        self._budget = on_disk.BudgetCallback(settings.budget(), None if driver is None else driver.meter, processes)
        self._saved = on_disk.Saved(self.collection, processes)
        self.add_callback(self._budget)
        if driver is not None:
            self._record = on_disk.RunRecord(run_dir, sections.config(self.args), self._update_metrics, driver.closing)
            self.add_callback(self._record)

    def _check_older_rows(self, settings: Settings) -> None:
        """Refuse GSPO with carried rows that have an engine's log-probs, whose rounding is wider than its range."""
        args = self.args
        narrow = self._ratio_per_token and args.importance_sampling_level == "sequence"  # RLOO has no such argument
        narrow = narrow and (high := max(args.epsilon, args.epsilon_high or 0)) < TOKEN_LEVEL
        engine = "use_vllm=True" if args.use_vllm else None if self._engine is None else "engine_slots"
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
        computed = not aligned or (args.use_vllm and args.vllm_importance_sampling_correction)  # by TRL, of every row
        if narrow and engine and not computed and settings.carries_groups:
            accepted = (
                f"0 with importance_sampling_level='sequence', a clip range of {high:g} (epsilon, epsilon_high) and "
                f"{engine}: an older answer has the engine's log-probs, whose rounding is wider than the range"
            )
            refuse("filter_groups.max_carry_steps", settings.surplus().max_carry_steps, accepted)

    def _driver(self, settings: Settings, prompts: DatasetPrompts, collection: Collection) -> Driver:
        print(settings.summary(), flush=True)
        rehearse(settings, prompts)
        groups, seed = settings.train_batch_size, self.args.seed
        order = trl_rows.SamplerOrder(prompts, groups=groups, shuffle=self.shuffle_dataset, seed=seed)
        config, rows = settings.gate_config, collection.rows
        gate = None if config is None else trl_rows.CompletionGate(config, settings.seed, rows)
        # TRL's own generation is sized for its batch; our engine has slots, which a batch of one group leaves idle.
        slots = 0 if self._engine is None else self._engine.slots * self.accelerator.num_processes
        backend = Rounds(collection.events, room=max(self.args.generation_batch_size, slots))
        parts = self.reward_func_names if len(self.reward_func_names) > 1 else ()
        collector = settings.collector(prompts, order, components=parts)
        return Driver(collector, backend, rows, gate, budget=settings.budget())

    # -- a batch -------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch, or in training the batch that the collector takes."""
        if self.collection is None or not self.model.training:
            return self._generate_and_score(inputs)
        logged = len(self._metrics["train"]["frac_reward_zero_std"])
        try:
            output = self.collection.collect(self._generate_round, self._log_probs, self._rewards())
        except Exhausted as error:
            if self.collection.driver is not None:
                self.collection.driver.put_back()
            self._step, self._buffered_inputs = self._begun
            raise self._save_unfinished(error) from error
        self._log_batch(logged)
        return self._on_device(output)

    def _generate_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output

    def _on_device(self, columns: dict[str, Any]) -> dict[str, Any]:
        device = self.accelerator.device
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in columns.items()}

    def _generate_round(
        self, inputs: list[dict[str, Any]], group_size: int, seeds: list[int]
    ) -> tuple[dict[str, Any], list[CompletionRow]]:
        """TRL's own generation and scoring of these rows, which are groups of this size to it."""
        with having(self, num_generations=group_size, _seeds=seeds):
            output = self._generate_and_score(inputs)
        scored, self._scored = self._scored, None
        assert scored is not None, "TRL scored no completion"
        first = self.accelerator.process_index * len(inputs)
        rewards = scored.rewards[first : first + len(inputs)].tolist()
        longest = self.args.max_completion_length or math.inf
        by_tools = self._tool_tokens or [0] * len(inputs)
        prompts, completions = (list(map(texts_alone, texts)) for texts in (scored.prompts, scored.completions))
        columns = trl_rows.split_rows(output, scored.ids), rewards, prompts, completions, scored.ids, by_tools
        return output, [
            CompletionRow(one, tuple(own), prompt, completion, is_truncated(ids, longest, self._ends), tools)
            for one, own, prompt, completion, ids, tools in zip(*columns, strict=True)
        ]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's; the rows of a new batch that have a signal come first in each update."""
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._only_signal and self._buffered_inputs is not before:
            self._buffered_inputs = trl_rows.signal_first(self._buffered_inputs, self.args.gradient_accumulation_steps)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        if self.model.training and self.accelerator.sync_gradients:  # the next micro-batch is of another update
            self._begun = self._step + 1, self._left(self._step + 1)
        return inputs

    def _left(self, step: int) -> Any:
        """Return the batch of which micro-batches are left after so many of them."""
        return self._buffered_inputs if step % (self.args.steps_per_generation * self.num_iterations) else None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        try:
            rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except (TypeError, ValueError) as error:
            if traceback.extract_tb(error.__traceback__)[-1].name != "_calculate_rewards":
                raise  # a reward function's own
            names = ", ".join(self.reward_func_names)
            raise ValueError(f"reward_funcs={names}: {error}; accepted: a list of a number or None each") from error
        self._scored = Scored(prompts, completions, completion_ids_list, rewards)
        if self.collection is not None and not self.model.training:
            self._count_answers(inputs, rewards)
        return rewards

    def _count_answers(self, inputs: list[dict[str, Any]], rewards: Tensor) -> None:
        """Log each answer of a validation, in all and under the values of its row's columns; TRL logs the mean.

        TRL's own ``eval_reward`` is a mean over batches, of which the last may be small.
        """
        rewards = rewards[: self._answers_asked_for(len(rewards))]
        judged = ACCURACY in self.reward_func_names
        right = rewards.nan_to_num() @ self.reward_weights.to(rewards)
        if judged:  # NaN where the reward function returned none
            accuracy = rewards[:, self.reward_func_names.index(ACCURACY)]
            right = torch.where(accuracy.isnan(), right, accuracy)
        # verl's name for the mean over a validation that has so many answers of each prompt.
        whole = f"val-core/{self._validated}/{ACCURACY if judged else 'reward'}/mean@{self.num_generations_eval}"
        columns = self._validate_by
        rows = [[whole, *(metric_name(column, value_of(row, column)) for column in columns)] for row in inputs]
        failed = rewards.isnan().all(dim=1)  # no function has graded the answer, which may be right
        if failed.any():
            logger.warning("%d of %d answers do not count: no reward function graded them", failed.sum(), len(failed))
        labelled = Processes(self.accelerator).gathered(rows)[: len(rewards)]
        graded = zip(labelled, right.tolist(), failed.tolist(), strict=True)
        for labels, one in ((labels, one) for labels, one, lost in graded if not lost):
            for label in labels:
                self._metrics["eval"][label].append(one)
        shown = {name: sum(ones) / len(ones) for name, ones in self._metrics["eval"].items() if column_and_value(name)}
        for column, values in by_column(shown).items():
            check_values(column, len(values))
        if self.collection is not None and self.collection.driver is not None:
            self.collection.driver.collector.beliefs.tell(shown)  # so far; only an oracle listens

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """The Trainer's; of several data sets each has a name behind ``eval_``."""
        with having(self, _validated=metric_key_prefix.removeprefix("eval_")):
            return super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)

    def _answers_asked_for(self, answers: int) -> int:
        """Return how many answers of a validation's batch the data ask for.

        So that every process has a whole batch, accelerate fills the last one up with the first rows again, unless it
        drops what is left over.
        """
        state = self.accelerator.gradient_state
        filled_up = state.end_of_dataloader and not self.args.dataloader_drop_last
        if not filled_up or not hasattr(state.active_dataloader.dataset, "__len__"):
            return answers
        asked: int = len(state.active_dataloader.dataset) * self.num_generations_eval
        together: int = self.args.eval_batch_size * self.accelerator.num_processes
        return min(answers, (asked - 1) % together + 1)

    def _rewards(self) -> Rewards:
        raise NotImplementedError

    # -- log-probs -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _log_probs(self, rows: list[CompletionRow]) -> list[Tensor]:
        columns = self._on_device(trl_rows.join_rows(rows, self._text_tokenizer.pad_token_id, None))
        seen = {name: value for name, value in columns.items() if name in trl_rows.IMAGES}
        ids = torch.cat([columns["prompt_ids"], columns["completion_ids"]], 1)
        mask = torch.cat([columns["prompt_mask"], columns["completion_mask"]], 1)
        size = self.args.per_device_train_batch_size
        width = columns["completion_ids"].shape[1]
        found = self._get_per_token_logps_and_entropies(self.model, ids, mask, width, batch_size=size, **seen)[0].cpu()
        return [one[: len(row.tensors["completion_ids"])].clone() for one, row in zip(found, rows, strict=True)]

    # -- a loss --------------------------------------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; its normalisation ignores padding rows and counts skipped ones."""
        scale = inputs.get(SCALE)
        if self._only_signal:
            inputs, share = trl_rows.with_signal(inputs)
            if not share:
                return trl_rows.no_loss(model)
            scale = share if scale is None else scale * share
        inputs = dict(inputs)  # a batch may serve several updates
        beta = self.beta
        if scale is not None and self._mean_of_rows:
            # Each row's term is proportional to its advantage or to ``beta``, and their sum is divided by the number of
            # rows. The entropy bonus and a router's loss are means over tokens: rows without a token do not thin them.
            inputs["advantages"] = inputs["advantages"] * scale
            beta = beta * scale if beta else beta
        with having(self, beta=beta, _in_loss=inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's; in a loss, rows that this very policy wrote get their old log-probs."""
        if not (self._eval_loss or self.model.training):  # an evaluation that computes no loss
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        given = model, input_ids, attention_mask, logits_to_keep, *args
        found = super()._get_per_token_logps_and_entropies(*given, **kwargs)
        inputs, self._in_loss = self._in_loss, None
        if inputs is not None:
            log_probs, old = found[0].detach(), inputs.get(trl_rows.LOG_PROBS)
            if self._weights_guard is not None and self.model.training:
                self._weights_guard.see(inputs, log_probs)
            if old is not None:
                old.copy_(torch.where(old.isnan(), log_probs, old))
        return found

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's; without a loss where none is asked for."""
        if self._eval_loss:
            return super().prediction_step(model, inputs, *args, **kwargs)
        self._prepare_inputs(inputs)
        return None, None, None

    # -- the engine ----------------------------------------------------------------------------------------------------

    def _rollouts(self, slots: int) -> EngineRollouts:
        if is_adapted(self.model):
            check_adapters(self.model, "engine_slots", slots)
        require(not self._sees_images, "engine_slots", slots, "none with a model that sees images")
        own = getattr(self, "rollout_func", None) is None
        require(own, "engine_slots", slots, "none with a rollout_func, which generates in its place")
        whole = not self.is_fsdp_enabled and getattr(self.accelerator.state.deepspeed_plugin, "zero_stage", 0) < 3
        accepted = "none with FSDP or DeepSpeed ZeRO-3, where no process has all the weights that an engine needs"
        require(whole, "engine_slots", slots, accepted)
        tokenizer, device = self.processing_class, self.accelerator.device
        made = EngineRollouts(self.args, slots=slots, eos_ids=self._ends, pad_id=tokenizer.pad_token_id, device=device)
        check_length(self.model.config, self.args.max_completion_length + 1, "max_completion_length + 1")
        return made

    @property
    def _ends(self) -> Sequence[int]:
        """The ids that end a completion; TRL 1.14 knows the tokenizer's alone."""
        ids: Sequence[int] = getattr(self, "eos_token_ids", [self._text_tokenizer.eos_token_id])
        return ids

    @property
    def _sees_images(self) -> bool:
        return hasattr(self.processing_class, "image_processor")

    @property
    def _text_tokenizer(self) -> Any:
        return self.processing_class.tokenizer if self._sees_images else self.processing_class

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self._turns is None:
            own = self._plain_seeds(prompt_ids) if self._seeds is None else self._seeds
            self._turns = Turns(prompt_ids, own, self.args.max_completion_length)
        seeds, limits = self._turns.next(prompt_ids)
        model = self.accelerator.unwrap_model(self.model_wrapped)
        found = self._engine.generate(model, self.state.global_step, prompt_ids, seeds, limits)
        ids = [one.token_ids for one in found]
        self._turns.wrote(prompt_ids, ids)
        return (ids, [one.log_probs for one in found]) if self._ratio_per_token else ids

    def _generate(self, prompts: list[Any]) -> Any:
        """TRL's: a turn of every conversation, and further turns of those that call tools."""
        self._turns = None
        return super()._generate(prompts)

    def _plain_seeds(self, prompt_ids: Sequence[Sequence[int]]) -> list[int]:
        """Of rollouts that no collector asked for: an evaluation draws the same noise each time, a batch its own.

        A group may lie on several processes, so rollouts are numbered over all of them.
        """
        numbered = list(enumerate(prompt_ids, self.accelerator.process_index * len(prompt_ids)))
        if self.model.training:
            return [hashed(self.args.seed, self._step, number, *ids) for number, ids in numbered]
        size = NUMBERED * self.num_generations_eval
        return [hashed(self.args.seed, "evaluation", number % size, *ids) for number, ids in numbered]

    # -- logs ----------------------------------------------------------------------------------------------------------

    def _log_batch(self, logged: int) -> None:
        """Log the collector's metrics, and correct what TRL logged of rounds that were not whole groups."""
        collection, metrics = self.collection, self._metrics["train"]
        assert collection is not None
        assert collection.batch is not None
        del metrics["frac_reward_zero_std"][logged:]
        flat = [len(set(group.rewards)) == 1 for group in collection.batch.groups]
        metrics["frac_reward_zero_std"].append(sum(flat) / max(1, len(flat)))
        # TRL's table of completions: the advantage of every rollout that is trained, NaN of the others.
        found = [collection.trained.get(place, math.nan) if place else math.nan for place in collection.generated]
        table = self._logs["advantages"]
        before = list(table)[: max(0, len(table) - len(found))]
        table.clear()
        table.extend([*before, *found])
        on_disk.add_logged(metrics, {"train/padding_rollouts": collection.generated.count(None)}, metrics)
        if not collection.batch.more:
            self._before_update = dict(metrics)
        on_disk.add_logged(metrics, collection.batch.metrics, self._before_update)
        if collection.driver is not None:
            step = self.state.global_step + 1
            self._record.take(step, collection.batch, collection.rows, collection.trained)
            self._record.trains(step)

    def _update_metrics(self) -> dict[str, float]:
        """What is known of an update only once it is made."""
        return {**self._budget.metrics(), **(self._weights_guard.metrics if self._weights_guard else {})}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save_collected(self, folder: Path) -> None:
        if self.collection is not None:
            self._saved.write(folder, self._step, self._left(self._step))

    def _load_collected(self, folder: Path) -> None:
        if self.collection is not None:
            self._step, self._buffered_inputs = self._begun = self._saved.read(folder, self.accelerator.device)
