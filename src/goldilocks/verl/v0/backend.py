"""verl's V0 generation as a backend: a round of requests is one generation batch, and its answers are rollouts.

verl's training loop holds a batch before its prompts and their numbers of rollouts are known. ``fit`` draws a batch of
prompts, asks for ``rollout.n`` rollouts of each, and joins the two. Here the loader hands out a placeholder,
``_get_gen_batch`` turns it into a ``Pending``, and verl's rollout manager fills it with the driver. So everything is
generated, and timed, where ``fit`` generates. To ``fit`` each rollout is a prompt of its own with ``rollout.n=1``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from goldilocks.core import Collector
from goldilocks.core.open_groups import issue_order
from goldilocks.drive.backend import Rounds, places
from goldilocks.drive.driver import Driver
from goldilocks.rewards import is_number
from goldilocks.types import Event, Failure, Request, Rollout
from goldilocks.verl.v0.rows import ProtoRows, Row, objects, rows_of

Timing = dict[str, float]
SLOWEST = "agent_loop/slowest/"
MARK = "__pending__"


class GenerationBatches(Rounds):
    """Generates with verl's rollout manager."""

    def __init__(
        self,
        manager: Any,
        collector: Collector,
        rows: ProtoRows,
        prompts: Callable[[Sequence[int]], DataProto],
        generation_batch: Callable[[DataProto], DataProto],
    ) -> None:
        """``prompts`` are rows of the data set; ``generation_batch`` is verl's ``_get_gen_batch``."""
        super().__init__(self._round)
        self._manager = manager
        self._collector = collector
        self._rows = rows
        self._prompts = prompts
        self._generation_batch = generation_batch
        self._meta: dict[str, Any] = {}
        self._calls: list[tuple[int, Timing]] = []
        self._reward_keys: dict[str, None] = {}

    def begin_batch(self, meta: dict[str, Any]) -> None:
        """Begin to generate for a batch; ``meta`` is what ``fit`` says of it."""
        self._meta, self._calls = meta, []

    def about(self, rows: DataProto) -> dict[str, Any]:
        """Return what verl says of a generated batch: how long it took, and which columns the reward function has."""
        keys = [key for key in self._reward_keys if key in rows.non_tensor_batch]
        return {"timing": merge_timings(self._calls), "reward_extra_keys": keys}

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
        repeats = np.repeat(np.arange(len(requests)), [request.n for request in requests])
        generation = generation.select_idxs(repeats)
        generation.meta_info.update(self._meta)
        # First issued, first served. With `full_determinism` verl names a request, and so its noise, by this number.
        numbers = [(issue_order(request.uid) << 16) + number for request, number, _ in places(requests)]
        generation.non_tensor_batch["priority"] = np.array(numbers, dtype=np.int64)
        answers = (answer for output in self._outputs(generation) for answer in self._answers(output))
        prompt_rows = list(rows_of(prompts))
        for (request, number, place), (row, measured) in zip(places(requests), answers, strict=True):
            self._rows.put((request.uid, number), prompt_rows[place].with_fields_of(row))
            if measured["tokens"]:
                yield Rollout(request.uid, number, version=self._collector.step, **measured)
            else:
                yield Failure(request.uid, number, "empty_response")

    def _outputs(self, batch: DataProto) -> list[DataProto]:
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
        self._calls += [(len(output), output.meta_info.pop("timing", {})) for output in outputs]
        return outputs

    def _answers(self, output: DataProto) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Yield each row that verl generated, and what a ``Rollout`` says of it."""
        if "rm_scores" not in output.batch:
            raise ValueError("verl returned rollouts without rewards, and groups are judged by their rewards")
        keys = output.meta_info.get("reward_extra_keys", [])
        self._reward_keys.update(dict.fromkeys(keys))
        longest = output.batch["responses"].shape[1]
        rewards = output.batch["rm_scores"].sum(-1).tolist()
        generated = output.batch["response_mask"].sum(-1).tolist()
        lengths = output.batch["attention_mask"][:, -longest:].sum(-1).tolist()
        for place, row in enumerate(rows_of(output)):
            metrics = {key: float(row.values[key]) for key in keys if is_number(row.values[key])}
            tokens, length = int(generated[place]), int(lengths[place])
            yield (
                row,
                {
                    "reward": rewards[place],
                    "tokens": tokens,
                    "metrics": metrics,
                    "truncated": length >= longest,
                    "tool_tokens": length - tokens,  # that stand between them
                },
            )


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
