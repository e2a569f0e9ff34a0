"""verl's V0 generation as a backend: a round of requests is one generation batch, and its answers are rollouts.

verl's training loop holds a batch before its prompts and their numbers of rollouts are known. ``fit`` draws a batch of
prompts, asks for ``rollout.n`` rollouts of each, and joins the two. Here the loader hands out a placeholder,
``_get_gen_batch`` turns it into a ``Pending``, and verl's rollout manager fills it with the driver. So everything is
generated, and timed, where ``fit`` generates. To ``fit`` each rollout is a prompt of its own with ``rollout.n=1``.

Finished rollouts are kept on the driver until they are trained or dropped. A row is everything verl's batch holds of
one rollout. Rows are copied out of the generation batch they came with, so that a dropped group's memory is free at
once. What a gate on them needs of the policy is computed while the batch is being filled.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto

from goldilocks.core import Collector
from goldilocks.core.groups import issue_order
from goldilocks.drive.backend import Rounds, places
from goldilocks.drive.driver import Driver
from goldilocks.drive.filter_gate import FilterGate
from goldilocks.drive.gate import Judgement
from goldilocks.drive.rows import MemoryRows, Place
from goldilocks.engine.engine import is_truncated
from goldilocks.filtering import PPOFilterConfig, pad_batch
from goldilocks.rewards import is_number
from goldilocks.types import Event, Failure, Group, Request, Rollout
from goldilocks.verl.store import load_rows, save_rows
from goldilocks.verl.update.gates import KLRewardGate

MARK = "__pending__"  # a column that a placeholder has, and no batch of prompts
TRAINED = "__trained__"  # of each row, whether it is trained: baselines come from all
STALE = "__stale__"  # of each row, whether an older policy wrote it

# Returns the tensors of these rows, with ``old_log_probs`` and, if asked for, ``ref_log_prob``.
WithLogProbs = Callable[[DataProto, bool], Mapping[str, Tensor]]
OfBatch = Callable[[Sequence[Group]], DataProto]  # the rows of groups
OfGroups = Callable[[Sequence[Group]], Mapping[str, Tensor]]  # their tensors, with both log-probs


class GenerationBatches(Rounds):
    """Generates with verl's rollout manager."""

    def __init__(
        self,
        manager: Any,
        collector: Collector,
        rows: ProtoRows,
        prompts: Callable[[Sequence[int]], DataProto],
        generation_batch: Callable[[DataProto], DataProto],
        ends: Collection[int],
    ) -> None:
        """``prompts`` are rows of the data; ``generation_batch`` is verl's ``_get_gen_batch``; ``ends`` end answers."""
        super().__init__(self._round)
        self._manager = manager
        self._collector = collector
        self._rows = rows
        self._prompts = prompts
        self._generation_batch = generation_batch
        self._ends = ends
        self._meta: dict[str, Any] = {}
        self._calls: list[dict[str, float]] = []  # verl's timing of each
        self._reward_keys: dict[str, None] = {}

    def begin_batch(self, meta: dict[str, Any]) -> None:
        """Begin to generate for a batch; ``meta`` is what ``fit`` says of it."""
        self._meta, self._calls = meta, []

    def about(self, rows: DataProto) -> dict[str, Any]:
        """Return what verl says of a generated batch: the timing of its slowest call, and the reward's columns."""
        keys = [key for key in self._reward_keys if key in rows.non_tensor_batch]
        parts = [f"agent_loop/slowest/{part}" for part in ("generate_sequences", "tool_calls", "compute_score")]
        slowest = max(self._calls, key=lambda timing: sum(timing.get(part, 0.0) for part in parts), default={})
        return {"timing": slowest, "reward_extra_keys": keys}

    def state_dict(self) -> dict[str, Any]:
        return {"reward_keys": list(self._reward_keys)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reward_keys = dict.fromkeys(state["reward_keys"])

    def _round(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Generate everything requested; yield what became of each rollout, in the order of the requests."""
        self._rows.retain(self._collector.alive)  # the rows of dropped groups are large
        prompts = self._prompts([request.prompt.index for request in requests])
        prompts.non_tensor_batch["uid"] = objects([request.uid for request in requests])
        generation = self._generation_batch(prompts)
        generation = generation.select_idxs(np.repeat(np.arange(len(requests)), [request.n for request in requests]))
        generation.meta_info.update(self._meta)
        # First issued, first served. With `full_determinism` verl names a request, and so its noise, by this number.
        numbers = [(issue_order(request.uid) << 16) + number for request, number, _ in places(requests)]
        generation.non_tensor_batch["priority"] = np.array(numbers, dtype=np.int64)
        answers = (answer for output in self._outputs(generation) for answer in self._answers(output))
        prompt_rows = list(rows_of(prompts))
        for (request, number, place), (row, measured) in zip(places(requests), answers, strict=True):
            asked = prompt_rows[place]
            whole = ProtoRow({**asked.tensors, **row.tensors}, {**asked.values, **row.values})
            self._rows.put((request.uid, number), whole)
            if measured["tokens"]:
                yield Rollout(request.uid, number, version=self._collector.step, **measured)
            else:
                yield Failure(request.uid, number, "empty_response")

    def _outputs(self, batch: DataProto) -> list[DataProto]:
        """Generate with all agent-loop workers, each with the same number of rows; the remainder is a second call.

        verl only splits a batch evenly, and padding it would generate rollouts that were not requested.
        """
        rest = len(batch) % len(getattr(self._manager, "agent_loop_workers", (None,)))
        parts = [(self._manager, batch.slice(0, len(batch) - rest))] if len(batch) > rest else []
        if rest:
            few = copy.copy(self._manager)
            few.agent_loop_workers = self._manager.agent_loop_workers[:rest]
            parts.append((few, batch.slice(len(batch) - rest, None)))
        with ThreadPoolExecutor(len(parts)) as pool:
            outputs = list(pool.map(lambda part: part[0].generate_sequences(part[1]), parts))
        self._calls += [output.meta_info.pop("timing", {}) for output in outputs]
        return outputs

    def _answers(self, output: DataProto) -> Iterator[tuple[ProtoRow, dict[str, Any]]]:
        """Yield each row that verl generated, and what a ``Rollout`` says of it."""
        if "rm_scores" not in output.batch:
            raise ValueError("verl returned rollouts without rewards, and groups are judged by their rewards")
        keys = output.meta_info.get("reward_extra_keys", [])
        self._reward_keys.update(dict.fromkeys(keys))
        responses = output.batch["responses"]
        longest = responses.shape[1]
        rewards = output.batch["rm_scores"].sum(-1).tolist()
        generated = output.batch["response_mask"].sum(-1).tolist()
        lengths = output.batch["attention_mask"][:, -longest:].sum(-1).tolist()
        for place, row in enumerate(rows_of(output)):
            tokens, length = int(generated[place]), int(lengths[place])
            measured = {
                "reward": rewards[place],
                "tokens": tokens,
                "metrics": {key: float(row.values[key]) for key in keys if is_number(row.values[key])},
                "truncated": is_truncated(responses[place, :length].tolist(), longest, self._ends),
                "tool_tokens": length - tokens,  # that stand between them
            }
            yield row, measured


class Pending(DataProto):
    """A placeholder for rows that are not generated yet."""

    def __init__(self, placeholder: DataProto) -> None:
        super().__init__()
        self.placeholder = placeholder

    def __len__(self) -> int:
        """Return a number that no batch exceeds: ``fit`` truncates the generated batch to it."""
        return sys.maxsize

    def repeat(self, repeat_times: int = 1, interleave: bool = True) -> Pending:
        """Return the placeholder unchanged: the number of rollouts is decided during generation."""
        return self

    def fill(self, rows: DataProto) -> DataProto:
        """Put these rows into the batch that ``fit`` holds; return what ``fit`` joins to it."""
        self.placeholder.batch = TensorDict({"dummy_tensor": torch.zeros(len(rows), 1, dtype=torch.uint8)}, len(rows))
        self.placeholder.non_tensor_batch = {"uid": rows.non_tensor_batch["uid"]}
        return rows


def placeholder() -> dict[str, Any]:
    """Return an empty batch as a data loader yields it."""
    return {"dummy_tensor": torch.zeros(1, 1, dtype=torch.uint8), MARK: np.array([True], dtype=object)}


class CollectingManager:
    """Fills a ``Pending`` batch and passes any other on to verl's manager."""

    def __init__(self, manager: Any, driver: Driver, backend: GenerationBatches, rows: ProtoRows) -> None:
        self._manager = manager
        self._driver = driver
        self._backend = backend
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def generate_sequences(self, batch: DataProto) -> DataProto:
        """Return the batch that the driver fills, or what verl generates."""
        if not isinstance(batch, Pending):
            return self._manager.generate_sequences(batch)
        self._backend.begin_batch(batch.meta_info)
        rows = self._rows.of_batch(self._driver.batch(), self._driver.collector.step)
        rows.meta_info = self._backend.about(rows)
        return batch.fill(rows)


@dataclass(frozen=True, slots=True)
class ProtoRow:
    """One rollout: a tensor or a value for each field."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


class ProtoRows(MemoryRows[ProtoRow]):
    """Rows that become verl's ``DataProto``."""

    def of_batch(self, groups: Sequence[Group], policy: int) -> DataProto:
        """Return every row of the groups. Rows that are not trained are marked and count for the baseline only.

        ``policy`` is the version that is being trained, in updates.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        trained = {(rollout.uid, rollout.index) for group in groups for rollout in group.trained}
        places = [(rollout.uid, rollout.index) for rollout in rollouts]
        batch = self.batch(places)
        batch.non_tensor_batch[TRAINED] = np.array([place in trained for place in places])
        written = [(rollout.version, group.version) for group in groups for rollout in group.rollouts]
        versions = [of_group if own is None else own for own, of_group in written]
        batch.non_tensor_batch[STALE] = np.array(versions) < policy
        return batch

    def batch(self, places: Sequence[Place]) -> DataProto:
        """The rows of these rollouts, in this order, with their group's name as ``uid``."""
        rows = self.get(places)
        tensors = {name: torch.stack([row.tensors[name] for row in rows]) for name in rows[0].tensors}
        names = dict.fromkeys(name for row in rows for name in row.values)
        values = {}
        for name in names:  # numbers as a numeric array and anything else as objects, as verl has them
            column = [row.values.get(name) for row in rows]
            numbers = all(isinstance(value, (bool, int, float, np.generic)) for value in column)
            values[name] = np.array(column) if numbers else objects(column)
        values["uid"] = objects([uid for uid, _ in places])
        return DataProto.from_dict(tensors=tensors, non_tensors=values)

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        save_rows([[*place, row.tensors, row.values] for place, row in self.of_groups(rollouts).items()], folder)

    def load(self, folder: Path) -> tuple[()]:
        """Take back what ``save`` wrote; nothing that was unfinished can go on."""
        for uid, index, tensors, values in load_rows(folder):
            self.put((uid, index), ProtoRow(tensors, values))
        return ()


def rows_of(batch: DataProto) -> Iterator[ProtoRow]:
    """The batch, row by row."""
    columns = {name: column.unbind(0) for name, column in batch.batch.items()}
    for place in range(len(batch)):
        tensors = {name: column[place].clone() for name, column in columns.items()}
        yield ProtoRow(tensors, {name: column[place] for name, column in batch.non_tensor_batch.items()})


def pad_to(batch: DataProto, divisor: int) -> DataProto:
    """Pad the batch at its end, with rows of zero mask, to a size that the workers can divide.

    The batch that ``fit`` holds is never padded: padding is added on the way to the workers and cut from their answer.
    """
    if len(batch) % divisor == 0:
        return batch
    columns = batch.non_tensor_batch
    rows = list(range(len(batch)))  # a uid per row, so that no row is moved to its group
    padded = pad_batch({**batch.batch, **columns}, rows, None, divisor)
    values = {name: padded.batch[name] for name in columns}
    values["uid"] = objects([*columns["uid"], *padded.uids[len(batch) :]])
    tensors = {name: padded.batch[name] for name in batch.batch.keys()}  # noqa: SIM118
    return DataProto.from_dict(tensors=tensors, non_tensors=values, meta_info=batch.meta_info)


def objects(values: Sequence[Any]) -> np.ndarray:
    """Return a column of objects: numpy would make a matrix of values that have a length."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


class BatchFilter(FilterGate):
    """``batch_filter.*`` on the rows that would be trained. The two gates cost log-probs of these rows once more."""

    def __init__(self, config: PPOFilterConfig, seed: int, of_batch: OfBatch, with_log_probs: WithLogProbs) -> None:
        super().__init__(config, seed)
        self._of_batch = of_batch
        self._with_log_probs = with_log_probs

    def judge(self, groups: Sequence[Group]) -> Judgement:
        every = self._of_batch(groups)
        chosen = every.non_tensor_batch[TRAINED]  # an allocator may train rollouts in any order
        places = [(rollout.uid, rollout.index) for group in groups for rollout in group.rollouts]
        batch = every.select_idxs(chosen)
        data = {"rewards": batch.batch["rm_scores"].sum(-1), "response_mask": batch.batch["response_mask"]}
        if self.filter.config.enable_two_gate_filter and "rollout_log_probs" in batch.batch:
            # A stale row is trained against the engine's log-probs: trainer and engine cannot differ in it.
            written = data["rollout_log_probs"] = batch.batch["rollout_log_probs"]
            stale = torch.from_numpy(batch.non_tensor_batch[STALE]).unsqueeze(-1)
            data["old_log_probs"] = torch.where(stale, written, self._with_log_probs(batch, False)["old_log_probs"])
        return self.judge_rows(list(itertools.compress(places, chosen)), data)


class FinalReward(KLRewardGate):
    """``filter_groups.metric=seq_final_reward`` on all rows of the groups."""

    def __init__(self, kind: str, coefficient: Callable[[], float], min_std: float | None, tensors: OfGroups) -> None:
        super().__init__(kind, coefficient, min_std)
        self._tensors = tensors

    def judge(self, groups: Sequence[Group]) -> Judgement:
        places = [(rollout.uid, rollout.index) for group in groups for rollout in group.rollouts]
        return self.judge_rows(places, self._tensors(groups))
