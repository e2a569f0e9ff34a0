"""A TRL run on disk: the collector in its checkpoints, and its record, with the names and files of a verl run.

``WholeCheckpoints`` is the order of writing, for every trainer: a run goes on from the last checkpoint that was written
to its end, and one that ends because its batch cannot be filled writes a checkpoint first.

``Saved`` is what the checkpoint of a synchronous trainer has beside TRL's files. ``goldilocks.npz`` and the folder of
rows are the first process's. ``goldilocks_batch_RANK.safetensors`` holds each process's part of a batch that serves
several updates, where a checkpoint falls between two of them. Loading executes no code.

``RunRecord`` writes what ``goldilocks report`` and ``goldilocks compare`` read:

====================================  ====================================================================
``config.yaml``                       the sections with verl's keys, and TRL's arguments under ``trl``
``metrics.jsonl``                     a line for each update, and one for what TRL logged of it
``rollouts/<step>.jsonl``             the rollouts of each batch
====================================  ====================================================================

``BudgetCallback`` ends training at the update that reaches a cost of ``goldilocks.budget``. ``WeightsGuardCallback``
(``goldilocks.on_stale_weights``) compares the sampling engine's log-probs with the trainer's in every update. TRL's own
``generate`` samples with the weights that are trained, and returns no log-probs; Goldilocks' engine and vLLM have
weights of their own, and return theirs.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from goldilocks.core import Exhausted
from goldilocks.core.limits import Budget
from goldilocks.core.source import conversation_text
from goldilocks.drive.driver import Meter
from goldilocks.drive.rows import MemoryRows, Place
from goldilocks.errors import require
from goldilocks.losses.log_probs import WeightsGuard, gap_sums, has_experts, mean_gap
from goldilocks.runs import checkpoints
from goldilocks.runs.checkpoints import FILE
from goldilocks.runs.costs import LENGTH, SCORE, SECONDS, SPENT
from goldilocks.runs.files import RunDir, set_aside, write_text
from goldilocks.runs.history import column_and_value, validated_source
from goldilocks.trl.collection import Batch, Collection, Processes
from goldilocks.trl.rows import COUNTS, LOG_PROBS, SAMPLED
from goldilocks.types import Rollout, row_key

Base: Any = object  # for mypy a trainer of TRL's, which comes behind the mixin
logger = logging.getLogger(__name__)

Buffered = list[dict[str, Any]]
ANOTHER_NUMBER = (
    "%s was written by %d processes, and this run has %d: updates that its batch had left are not made, and the run "
    "goes on with a new batch"
)
TOTALS = ("accounts/", "data/", "budget/")
# What TRL logs, by the name that a report knows.
NAMES = {
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "learning_rate": "actor/lr",
}


class WholeCheckpoints(Base):  # type: ignore[misc]
    """A mixin for a trainer of TRL's that has ``_save_collected(folder)`` and ``_load_collected(folder)``."""

    _renamed = False  # whether the checkpoint that was loaded last has weights under other names than the model

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's; ``resume_from_checkpoint=True`` takes the last checkpoint that was written to its end.

        A run that was over when it was saved has the weights of that checkpoint, and makes no update.
        """
        if resume_from_checkpoint is True:
            root = self.args.output_dir
            found = checkpoints.last_whole(Path(root))
            require(found is not None, "resume_from_checkpoint", True, f"False: {root} has no whole checkpoint")
            resume_from_checkpoint = str(found)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except Over:
            logger.warning("the run was over at update %d: nothing is trained", self.state.global_step)
            self.is_in_train = False
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            return TrainOutput(self.state.global_step, 0.0, {})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The Trainer's, and the weights that it leaves out.

        transformers saves some models, such as LLaVA, under the names of their first release. ``from_pretrained`` knows
        them; the Trainer does not, and would go on with the weights of the start.
        """
        self._renamed = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._renamed:
            there = self.model if model is None else model
            there.load_state_dict(type(there).from_pretrained(resume_from_checkpoint, dtype=there.dtype).state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._renamed = bool(load_result.unexpected_keys and load_result.missing_keys)
        if not self._renamed:
            super()._issue_warnings_after_load(load_result)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The collector's state first: TRL writes the file that makes the checkpoint count last."""
        folder = self._checkpoint_folder(trial)
        if self.args.should_save:  # one process: another might be late, and find the checkpoint whole
            checkpoints.begin_again(folder)
        self._save_collected(folder)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_collected(Path(checkpoint))

    def _save_unfinished(self, why: object) -> Exhausted:
        """Save what was generated for a batch that cannot be filled; return the error that says where.

        A run that goes on begins with what is saved here.
        """
        self._save_checkpoint(self.model, None)
        return Exhausted(f"{why} What was generated is saved in {self._checkpoint_folder(None)}.")

    def _save_rng_state(self, output_dir: str) -> None:
        """TRL's; what makes the checkpoint count comes next, and every process must have written its part by then."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def _checkpoint_folder(self, trial: Any) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"


class Saved:
    """Writes and reads what TRL's checkpoint lacks."""

    def __init__(self, collection: Collection, processes: Processes) -> None:
        self._collection, self._processes = collection, processes

    def write(self, folder: Path, step: int, buffered: Sequence[dict[str, Any]] | None) -> None:
        """Write everything; each process writes the batch it is training."""
        folder.mkdir(parents=True, exist_ok=True)
        flat = {
            f"{place}/{name}": torch.tensor(value) if name in COUNTS else value.clone()  # parts share single numbers
            for place, part in enumerate(buffered or ())
            for name, value in part.items()
            if isinstance(value, Tensor) or name in COUNTS
        }
        save_file(flat, folder / self._batch_file)
        self._collection.gathered([])  # what rewards of a validation have cost
        if self._collection.driver is not None:
            self._collection.driver.save(folder, step=step, processes=self._processes.count)

    def read(self, folder: Path, device: torch.device) -> tuple[int, Buffered | None]:
        """Take up where ``write`` was called; returns TRL's step and the batch it was training.

        A checkpoint without our state, as ``GRPOTrainer`` writes them, starts a collector anew. So does another number
        of processes start a batch anew: each has saved its own part.
        """
        if not self._processes.decided((folder / FILE).exists):
            return 0, None
        driver, rows = self._collection.driver, self._collection.rows

        def load() -> tuple[int, int, Any]:
            assert driver is not None
            state = driver.load(folder)
            return state["step"], state["processes"], rows.groups

        step, processes, rows.groups = self._processes.decided(load)
        file, own = folder / self._batch_file, self._processes.count
        batch = _nested(load_file(file, device=str(device))) if file.exists() else None
        if processes == own or self._processes.decided(lambda: batch is None):
            return step, batch
        logger.warning(ANOTHER_NUMBER, folder, processes, own)
        return 0, None

    @property
    def _batch_file(self) -> str:
        return f"goldilocks_batch_{self._processes.rank}.safetensors"


def _nested(flat: dict[str, Tensor]) -> Buffered | None:
    """Return the parts of a batch whose tensors were written as ``place/name``; None where there is none."""
    parts: dict[int, dict[str, Any]] = {}
    for key, value in flat.items():
        place, _, name = key.partition("/")
        parts.setdefault(int(place), {})[name] = value.tolist() if name in COUNTS else value
    return [parts[place] for place in sorted(parts)] or None


# -- the record --------------------------------------------------------------------------------------------------------


def add_logged(logged: dict[str, list[Any]], metrics: Mapping[str, float], before: Mapping[str, list[Any]]) -> None:
    """Add an update's metrics to the means that TRL logs, as they were ``before`` it; the last of running totals."""
    for name, value in metrics.items():
        kept = [] if name.startswith(TOTALS) else before.get(name, [])
        logged[name] = [*kept, float(value)]


class RunRecord(TrainerCallback):
    """Writes on the first process only.

    ``spent`` is what is known after an update alone, its seconds among it. ``closing`` is the run's last line.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        spent: Callable[[], Mapping[str, float]],
        closing: Callable[[], str],
    ) -> None:
        self._run = RunDir(path)
        self._config, self._spent, self._closing = config, spent, closing
        self._batch: dict[str, float] = {}
        # By step, of batches that are not being trained yet: the collector's metrics, and those of the rows.
        self._taken: dict[int, tuple[Mapping[str, float], Mapping[str, float]]] = {}
        self._trained: list[Rollout] = []  # of the batches of an update so far

    def take(self, step: int, batch: Batch, rows: MemoryRows[Any], advantages: Mapping[Place, float]) -> None:
        """Write the rollouts of a new batch in the form of verl's dumps, and keep its metrics until it is trained.

        ``rows`` have a ``prompt`` and a ``completion``.
        """
        trained = [(group, rollout) for group in batch.groups for rollout in group.trained]  # as verl counts them
        so_far = self._trained = [*(self._trained if batch.more else ()), *(rollout for _, rollout in trained)]
        mean = math.fsum(rollout.reward for rollout in so_far) / max(1, len(so_far))
        length = sum(rollout.tokens for rollout in so_far) / max(1, len(so_far))
        self._taken[step] = batch.metrics, {SCORE: mean, LENGTH: length}
        file = self._run.path / "rollouts" / f"{step}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a" if batch.more else "w", encoding="utf-8") as out:
            for group, rollout in trained:
                row = rows[rollout.uid, rollout.index]
                line = {
                    "input": conversation_text(row.prompt),
                    "key": group.prompt.key,
                    "output": conversation_text(row.completion),
                    "gts": None,
                    "score": rollout.reward,
                    "step": step,
                    "uid": row_key(rollout.uid, rollout.index, 0),
                    "advantage": advantages[rollout.uid, rollout.index],
                }
                out.write(json.dumps(line, ensure_ascii=False) + "\n")

    def trains(self, step: int) -> list[Mapping[str, float]]:
        """Have the lines from here on show the batch of this step; return the metrics of those that lead to it."""
        begun = [self._taken.pop(taken) for taken in [one for one in self._taken if one <= step]]
        for collected, own in begun:
            self._batch = {**collected, **own}
        return [collected for collected, _ in begun]

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set aside what an earlier run wrote, and write the configuration unless the command line has."""
        if not state.global_step:
            set_aside(self._run.metrics)
            set_aside(self._run.path / "rollouts")
        if not self._run.started_as.exists():
            config = {**self._config, "trl": json.loads(args.to_json_string())}
            write_text(self._run.config, yaml.safe_dump(config, sort_keys=False))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the update's line. Several updates on one batch share its score; only the first counts its groups."""
        self._write(state.global_step, {**self._batch, **self._spent()})
        self._batch = {name: value for name, value in self._batch.items() if name.startswith(("critic/", *TOTALS))}

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        print(self._closing(), flush=True)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Write what only TRL knows: the loss of an update, the accuracy of an evaluation."""
        known = {NAMES[name]: value for name, value in (logs or {}).items() if name in NAMES}
        own = {name.removeprefix("eval_"): value for name, value in (logs or {}).items()}
        known |= {name: value for name, value in own.items() if validated_source(name) or column_and_value(name)}
        if known:
            self._write(state.global_step, known)

    def _write(self, step: int, data: Mapping[str, float]) -> None:
        with self._run.metrics.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, "data": dict(data)}) + "\n")


class Over(Exception):
    """The checkpoint that a run would go on from is its last."""


class BudgetCallback(TrainerCallback):
    """Measures every update on the first process, and tells the others."""

    def __init__(self, budget: Budget, meter: Meter | None, processes: Processes) -> None:
        """``meter`` is the driver's, which is there on the first process only."""
        self._budget, self._meter, self._processes = budget, meter, processes
        self._running = False  # the clock
        self._seconds = 0.0  # of the last update

    def begin(self) -> None:
        """Start the clock of an update, unless it runs."""
        if self._meter is not None and not self._running:
            self._meter.begin_update()
        self._running = True

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Raise ``Over`` where nothing is left to do: the Trainer makes an update before it looks."""
        self._running = False
        bounded, meter = bool(self._budget.costs), self._meter
        spent = bounded and self._processes.decided(lambda: meter is not None and meter.share >= 1)
        if spent or state.global_step >= state.max_steps:
            raise Over

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.begin()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        """End training at the end of the budget; evaluate where another part of it is spent, if that is asked for."""
        self._running = False
        if self._meter is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # or what the GPU has yet to do would count as validation
            self._seconds = self._meter.end_update()
        if self._budget.costs:
            spent, due = self._processes.decided(self._spent)
            control.should_training_stop = control.should_training_stop or spent
            if spent and args.save_strategy == "steps":  # the Trainer has saved the update of ``max_steps`` alone
                control.should_save = True
            # Spread over the cost they are in the place of ``eval_steps``, which the Trainer has judged by now.
            control.should_evaluate = due if self._budget.validations else control.should_evaluate
        return control

    def _spent(self) -> tuple[bool, bool]:
        assert self._meter is not None
        return self._meter.share >= 1, self._meter.validation_due()

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the last update and, with a budget, the share of it that is spent."""
        assert self._meter is not None
        return {SECONDS: self._seconds, **({SPENT: self._meter.share} if self._budget.costs else {})}


class WeightsGuardCallback(TrainerCallback):
    """The guard for old weights: adds up how far the engine's log-probs are from the trainer's, over all processes."""

    def __init__(self, guard: WeightsGuard, accelerator: Any, logged: dict[str, list[float]]) -> None:
        """``logged`` are the values that TRL logs the means of."""
        self._guard, self._accelerator, self._logged = guard, accelerator, logged
        self._sums = torch.zeros(2, dtype=torch.float64)
        self.metrics: dict[str, float] = {}  # of the last update

    def see(self, inputs: Mapping[str, Any], log_probs: Tensor) -> None:
        """Add a micro-batch up; call this before ``old_per_token_logps`` is filled with ``log_probs``."""
        if (sampled := inputs.get(SAMPLED)) is not None:
            own, fresh = trainers_log_probs(inputs, log_probs, sampled)
            self._sums += gap_sums(own, sampled, fresh).cpu()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Judge the update whose micro-batches are all there."""
        sums = self._accelerator.reduce(self._sums.float().to(self._accelerator.device), reduction="sum")
        self._sums.zero_()
        self.metrics = self._guard.observe(mean_gap(sums.tolist()))
        for name, value in self.metrics.items():
            self._logged.setdefault(name, []).append(value)


def trainers_log_probs(inputs: Mapping[str, Any], now: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the trainer's log-probs from when the rows were written, and which tokens they can be compared for.

    TRL computes them as ``old_per_token_logps`` where a batch serves several updates; else they are those of ``now``.
    A carried row has the engine's own in their place, which say nothing.
    """
    mask = inputs["completion_mask"].bool()
    if "tool_mask" in inputs:  # the tokens of tools are not the model's
        mask = mask & inputs["tool_mask"].bool()
    old = inputs.get(LOG_PROBS)
    if old is None:
        return now, mask
    own = torch.where(old.isnan(), now, old)
    copied = ((old == sampled) | ~mask).all(1, keepdim=True)
    return own, mask & ~copied


def is_exact(args: Any, model: nn.Module) -> bool:
    """Whether trainer and engine both compute in fp32."""
    half = args.bf16 or args.fp16 or args.use_vllm
    return not half and all(one.dtype == torch.float32 for one in model.parameters())


def is_comparable(args: Any, model: nn.Module) -> bool:
    """Whether nothing but rounding tells the engine's log-probs from the trainer's."""
    dropped = any(isinstance(one, nn.Dropout) and one.p > 0 for one in model.modules())
    config: Any = getattr(model, "config", None)
    routed = config is not None and has_experts(config.to_dict())
    # Tokens are left out of the distribution that the engine reports.
    cut = (args.top_p or 1.0) < 1 or (args.top_k or 0) > 0 or args.min_p or args.vllm_structured_outputs_regex
    # The engine reports logits that more than the temperature has changed.
    altered = (args.repetition_penalty or 1.0) != 1 or args.generation_kwargs
    # A vLLM server, whose options are its own, may report log-probs without the temperature.
    raw = args.use_vllm and args.vllm_mode == "server" and args.temperature != 1
    return not (dropped or routed or cut or altered or raw)
