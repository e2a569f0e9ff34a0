"""A batch that verl's training loop holds before its prompts and their numbers of rollouts are known.

``fit`` draws a batch of prompts, asks for ``rollout.n`` rollouts of each, and joins the two. Here the loader hands out
a placeholder, ``_get_gen_batch`` turns it into a ``Pending``, and generation fills it. So everything is
generated, and timed, where ``fit`` generates. To ``fit`` each rollout is a prompt of its own with ``rollout.n=1``.

The collector's loop where verl's V0 generates: rounds of requests until a batch can be taken.

The collector decides; this module turns its requests into verl's generation batches, and verl's answers into
rollouts.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from goldilocks.core import Collector
from goldilocks.core.open_groups import issue_order
from goldilocks.drive.gate import Judgement
from goldilocks.drive.refill import Refills
from goldilocks.drive.rounds import WholeGroups, places
from goldilocks.types import Failure, Group, Request, Rollout
from goldilocks.verl.compat.rows import Row, RowStore, rows_of
from goldilocks.verl.update.gates import REASON

MARK = "__pending__"


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


def is_placeholder(batch: DataProto) -> bool:
    """Return whether the batch is a placeholder and not a batch of validation prompts."""
    return MARK in batch.non_tensor_batch


TRAINED = "__trained__"  # of each row, whether it is trained: baselines come from all
STALE = "__stale__"  # of each row, whether an older policy wrote it

# Judges a taken batch by its rows; returns the groups that are not to be trained.
Review = Callable[[DataProto], Sequence[str]]

Timing = dict[str, float]
SLOWEST = "agent_loop/slowest/"


@dataclass(frozen=True, slots=True)
class Answer:
    """One rollout as verl returned it."""

    row: Row
    reward: float
    tokens: int
    metrics: Mapping[str, float]
    truncated: bool

    def event(self, uid: str, index: int, version: int) -> Rollout | Failure:
        """Return the event for the collector."""
        if not self.tokens:
            return Failure(uid, index, "empty_response")
        return Rollout(uid, index, self.reward, self.tokens, self.metrics, self.truncated, version)


class CollectingManager:
    """verl's rollout manager, which collects a ``Pending`` batch and passes any other on."""

    def __init__(
        self,
        manager: Any,
        collector: Collector,
        rows: RowStore,
        prompts: Callable[[Sequence[int]], DataProto],
        generation_batch: Callable[[DataProto], DataProto],
        review: Review | None,
    ) -> None:
        """``prompts`` are rows of the data set; ``generation_batch`` is verl's ``_get_gen_batch``."""
        self._manager = manager
        self._collector = collector
        self._rows = rows
        self._prompts = prompts
        self._generation_batch = generation_batch
        self._review = review
        self._rounds = WholeGroups(collector.allocator)
        self._collector.allocator = self._rounds
        self._reward_keys: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def generate_sequences(self, batch: DataProto) -> DataProto:
        """Return the batch that the collector takes, or what verl generates."""
        if not isinstance(batch, Pending):
            return self._manager.generate_sequences(batch)
        calls: list[tuple[int, Timing]] = []
        self._fill(batch.meta_info, calls)
        refills = Refills(self._collector, REASON, flat=True)
        refills.judge(self._collector.take(), self._judgement)
        for groups in refills.replacements(lambda: self._fill(batch.meta_info, calls)):
            refills.judge(groups, self._judgement)
        rows = self._batch(self._collector.in_hand)
        rows.meta_info = {"timing": merge_timings(calls), "reward_extra_keys": self._keys_in(rows)}
        self._rows.retain(self._collector.alive)
        return batch.fill(rows)

    def _judgement(self, groups: Sequence[Group]) -> Judgement:
        """Refuse whole groups by their rows, where there is a review."""
        refused = set() if self._review is None else set(self._review(self._batch(groups)))
        whole = {g.uid: [rollout.index for rollout in g.rollouts] for g in groups if g.uid in refused}
        return Judgement(whole, {}, {})

    def _fill(self, meta: dict[str, Any], calls: list[tuple[int, Timing]]) -> None:
        while not self._collector.ready:
            requests = self._collector.requests()
            if requests:
                calls += self._round(requests, meta)

    # -- a round -------------------------------------------------------------------------------------------------------

    def _round(self, requests: Sequence[Request], meta: dict[str, Any]) -> list[tuple[int, Timing]]:
        """Generate everything requested, and tell the collector of each rollout in the order of the requests."""
        prompts = self._prompts([request.prompt.index for request in requests])
        prompts.non_tensor_batch["uid"] = _objects(request.uid for request in requests)
        generation = self._generation_batch(prompts)
        repeats = np.repeat(np.arange(len(requests)), [request.n for request in requests])
        generation = generation.select_idxs(repeats)
        generation.meta_info.update(meta)
        generation.non_tensor_batch["priority"] = _priorities(requests)
        outputs, calls = self._generate(generation)
        prompt_rows = list(rows_of(prompts))
        answers = (answer for output in outputs for answer in self._answers(output))
        self._rounds.begin(requests)
        for request, number, place in places(requests):
            answer = next(answers)
            self._rows.put(request.uid, number, prompt_rows[place].with_fields_of(answer.row))
            self._rounds.next(request.uid)
            self._collector.observe(answer.event(request.uid, number, self._collector.step))
        self._rows.retain(self._collector.alive)
        return calls

    def _generate(self, batch: DataProto) -> tuple[list[DataProto], list[tuple[int, Timing]]]:
        """Generate with all agent-loop workers, each with the same number of rows; the remainder is a second call.

        verl only splits a batch evenly, and padding it would generate rollouts that were not requested.
        """
        workers = len(getattr(self._manager, "agent_loop_workers", (None,)))
        rest = len(batch) % workers
        parts = [(self._manager, batch.slice(0, len(batch) - rest))] if len(batch) > rest else []
        if rest:
            few = copy.copy(self._manager)
            few.agent_loop_workers = self._manager.agent_loop_workers[:rest]
            parts.append((few, batch.slice(len(batch) - rest, None)))
        with ThreadPoolExecutor(len(parts)) as pool:
            outputs = list(pool.map(lambda part: part[0].generate_sequences(part[1]), parts))
        calls = [(len(output), output.meta_info.pop("timing", {})) for output in outputs]
        return outputs, calls

    def _answers(self, output: DataProto) -> Iterator[Answer]:
        """Yield each row that verl generated."""
        if "rm_scores" not in output.batch:
            raise ValueError("verl returned rollouts without rewards, and groups are judged by their rewards")
        keys = output.meta_info.get("reward_extra_keys", [])
        self._reward_keys.update(dict.fromkeys(keys))
        longest = output.batch["responses"].shape[1]
        rewards = output.batch["rm_scores"].sum(-1).tolist()
        tokens = output.batch["response_mask"].sum(-1).tolist()
        lengths = output.batch["attention_mask"][:, -longest:].sum(-1).tolist()
        for place, row in enumerate(rows_of(output)):
            metrics = {key: float(row.values[key]) for key in keys if _is_number(row.values[key])}
            yield Answer(row, rewards[place], int(tokens[place]), metrics, truncated=lengths[place] >= longest)

    # -- the batch -----------------------------------------------------------------------------------------------------

    def _batch(self, groups: Sequence[Group]) -> DataProto:
        """Return every row of the groups. Rows that are not trained are marked and count for the baseline only."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        trained = {(rollout.uid, rollout.index) for group in groups for rollout in group.trained}
        places = [(rollout.uid, rollout.index) for rollout in rollouts]
        batch = self._rows.batch(places)
        batch.non_tensor_batch[TRAINED] = np.array([place in trained for place in places])
        versions = [_version(rollout, group) for group in groups for rollout in group.rollouts]
        batch.non_tensor_batch[STALE] = np.array(versions) < self._collector.step
        return batch

    def _keys_in(self, rows: DataProto) -> list[str]:
        return [key for key in self._reward_keys if key in rows.non_tensor_batch]

    def state_dict(self) -> dict[str, Any]:
        return {"reward_keys": list(self._reward_keys)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reward_keys = dict.fromkeys(state["reward_keys"])


def _priorities(requests: Sequence[Request]) -> np.ndarray:
    """First issued, first served. With `full_determinism` verl names a request, and so its noise, by this number."""
    numbers = [(issue_order(request.uid) << 16) + number for request, number, _ in places(requests)]
    return np.array(numbers, dtype=np.int64)


def merge_timings(calls: Sequence[tuple[int, Timing]]) -> Timing:
    """Return the timings of one step's generation calls as those of one call, under verl's names.

    Each call is its number of rollouts and what verl measured of it.
    """
    if not calls:
        return {}
    slowest = max((timing for _, timing in calls), key=_of_slowest)
    merged = dict(slowest)
    for name in slowest:
        values = [(rollouts, timing[name]) for rollouts, timing in calls if name in timing]
        if name.startswith(SLOWEST):
            continue
        if name.endswith("/min"):
            merged[name] = min(value for _, value in values)
        elif name.endswith("/mean"):
            merged[name] = sum(n * value for n, value in values) / sum(n for n, _ in values)
        else:
            merged[name] = max(value for _, value in values)
    return merged


def _of_slowest(timing: Timing) -> float:
    parts = ("generate_sequences", "tool_calls", "compute_score")
    return sum(timing.get(SLOWEST + part, 0.0) for part in parts)


def _version(rollout: Rollout, group: Group) -> int:
    return group.version if rollout.version is None else rollout.version


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))


def _objects(values: Iterator[str]) -> np.ndarray:
    listed = list(values)
    column = np.empty(len(listed), dtype=object)
    column[:] = listed
    return column
