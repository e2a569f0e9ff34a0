"""The collector between TRL's asynchronous worker and its trainer: a backend, rows, the queue of samples, the worker.

TRL's loop, in a child process of its own, goes through the data and hands out scored groups of one size. Here the
collector asks for single rollouts, one task for each, and cancels those that nobody needs; conversation, tools,
requests to the server and reward functions are TRL's. A rollout is scored by itself, since the size of its group is not
known yet; its advantage is computed with the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutGroup, RolloutSample

from goldilocks.core import Exhausted
from goldilocks.drive.backend import CANCELLED, Unpaused, places
from goldilocks.drive.driver import ENDS_THE_RUN, Driver
from goldilocks.drive.rows import MemoryRows, Place
from goldilocks.rewards import spent
from goldilocks.runs.checkpoints import FILE, load_state, save_state
from goldilocks.trl.collection import Batch, Round
from goldilocks.types import Event, Failure, Group, Request, Rollout, hashed

POLL_S = 5.0  # between two looks at the worker's health
EPSILON = 1e-8  # TRL's
ROWS, REST = "rows.npz", "goldilocks_rest.npz"
PREFIX = "rewards/"  # of a reward function's value in a sample's metrics
BEAT_S = 0.1  # between two signs of life, and before the end of a run is seen
OPTIONS = ("prompt", "completion", "completion_ids")  # columns that reward functions get under names of TRL's own
seed_of_rollout: ContextVar[int] = ContextVar("seed_of_rollout")  # each task has its own
turns_of_rollout: ContextVar[list[int]] = ContextVar("turns_of_rollout")  # the tokens of each turn that is finished


class RolloutSamples(tuple[RolloutSample, ...]):
    """What is trained of one rollout: a sample, or several where its conversation was rewritten on the way."""

    __slots__ = ()

    @property
    def prompt(self) -> Any:
        return self[0].prompt

    @property
    def completion(self) -> Any:
        return self[0].completion


class SampleRows(MemoryRows[RolloutSamples]):
    """The samples of each rollout, in the memory of the first process."""

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        kept = self.of_groups(rollouts)
        packed = [{"place": [*place], "samples": [asdict(one) for one in row]} for place, row in kept.items()]
        save_state({"rows": packed}, folder / ROWS)

    def load(self, folder: Path) -> tuple[()]:
        self.groups = {}
        for packed in load_state(folder / ROWS)["rows"]:
            uid, index = packed["place"]
            self.put((uid, index), RolloutSamples(RolloutSample(**one) for one in packed["samples"]))
        return ()


class AskedRollouts(Unpaused):
    """The worker as a backend that never pauses: it generates while the trainer trains."""

    def __init__(self, worker: AskedWorker, rows: SampleRows, *, seed: int, stale_after_s: float) -> None:
        self._worker, self._rows, self._seed, self._stale_after_s = worker, rows, seed, stale_after_s
        self._in_flight: set[Place] = set()
        self._error = ""

    def submit(self, requests: Sequence[Request]) -> None:
        seeds = Round(tuple(requests), self._seed).seeds
        for (request, number, _), seed in zip(places(requests), seeds, strict=True):
            self._in_flight.add((request.uid, number))
            self._worker.tell(RolloutAsk((request.uid, number), request.prompt.index, seed))

    def events(self, within: float | None = None) -> Iterator[Event]:
        if within is None and not self._in_flight:
            return
        answers: queue.Queue[Answer] = self._worker.rollout_buffer
        first: Answer | None = None
        while first is None:  # a worker that has died or hangs is an error meanwhile
            try:
                first = answers.get(timeout=POLL_S if within is None else within or 1e-3)
            except queue.Empty:
                self._worker.check_health(self._stale_after_s)
                if within is not None:
                    return
        yield self._event(first)
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._event(answers.get_nowait())

    def cancel(self, uids: Sequence[str]) -> None:
        self._in_flight = {place for place in self._in_flight if place[0] not in uids}
        self._worker.tell(Cancel(tuple(uids)))

    def explain(self, failure: Failure) -> str:
        return f"the last one said: {self._error}" if self._error else super().explain(failure)

    def _event(self, answer: Answer) -> Event:
        uid, index = answer.place
        self._in_flight.discard(answer.place)
        spent.add(**answer.costs)
        if answer.error == CANCELLED:
            return Failure(uid, index, CANCELLED, answer.tokens)
        if not answer.samples:
            self._error = answer.error or "no token to train"
            reason = "error" if answer.error else "empty_response"
            if answer.error.startswith(f"{ENDS_THE_RUN}: "):  # the child begins an error with the name of its class
                reason = ENDS_THE_RUN
            return Failure(uid, index, reason, answer.tokens)
        self._rows.put(answer.place, RolloutSamples(answer.samples))
        values = answer.samples[0].metrics
        metrics = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
        return Rollout(
            uid,
            index,
            values["reward"],
            answer.tokens,
            {name: value for name, value in metrics.items() if value == value},  # not of functions that do not apply
            truncated=answer.truncated,
            version=self._worker.policies.get(answer.version),
            tool_tokens=answer.tool_tokens,
        )


class MicroBatches(set[int]):
    """TRL's set of trained groups, which its collator updates with the group of every sample of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.collated: deque[Counter[int]] = deque()

    def update(self, *groups: Iterable[int]) -> None:
        counted = Counter(group for some in groups for group in some)
        self.collated.append(counted)
        super().update(counted)


class UntilExhausted:
    """TRL's samples, which end where no batch can be filled any more: so the loaders of all processes end together."""

    def __init__(self, samples: Iterable[Any], collected: CollectedQueue) -> None:
        self._samples, self._collected = samples, collected

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._samples
        except Exhausted as error:
            self._collected.exhausted = error


class CollectedQueue:
    """In the place of TRL's queue: ``get`` returns the next sample of the batch that the driver has filled.

    Samples that were handed out and not yet trained are known, so that a checkpoint has them.
    """

    def __init__(self, driver: Driver, rows: SampleRows, micro_batches: MicroBatches) -> None:
        self.driver, self.rows = driver, rows
        self.batch: Batch | None = None
        self.trained: dict[Place, float] = {}  # the advantage of each rollout of the batch
        self._micro_batches = micro_batches
        self._left: deque[tuple[int, RolloutSample]] = deque()  # with the batch that each is of
        self._handed: deque[tuple[int, RolloutSample]] = deque()  # and not yet trained
        self._groups = 0  # that were numbered
        self.longest: float = math.inf  # tokens of a sample that TRL trains; it drops longer ones, and counts them
        # Called with the step, batch, rows and advantages of each new batch, which may be trained later.
        self.on_batch: Callable[[int, Batch, SampleRows, dict[Place, float]], None] = lambda *_: None
        self.exhausted: Exhausted | None = None  # why there is no next batch

    def get(self, timeout: float | None = None) -> RolloutSample:
        """Return the next sample. Waits as long as the batch takes; the backend looks after the worker."""
        while not self._left:
            groups, step = self.driver.batch(), self.driver.collector.step
            self.batch, self.trained = Batch.of(self.driver), {}
            for group in groups:
                self._left.extend((step, sample) for sample in self._samples(group))
            self.on_batch(step + 1, self.batch, self.rows, self.trained)
        number, sample = self._left.popleft()
        if len(sample.input_ids) <= self.longest:
            self._handed.append((number, sample))
        return sample

    def qsize(self) -> int:
        return len(self._left)

    @property
    def waiting(self) -> set[int]:
        """The groups that have samples which are not trained yet."""
        return {sample.group_id for _, sample in (*self._handed, *self._left)}

    @property
    def next_batch(self) -> int:
        """The batch that is trained next."""
        for number, _ in (*self._handed, *self._left):
            return number
        collector = self.driver.collector
        return collector.step + (not collector.owed)

    def trained_micro_batch(self) -> None:
        """Forget the samples of the oldest micro-batch: they are trained."""
        done = self._micro_batches.collated.popleft()
        waiting, self._handed = self._handed, deque()
        for number, sample in waiting:
            if done[sample.group_id] > 0:
                done[sample.group_id] -= 1
            else:
                self._handed.append((number, sample))

    def save(self, folder: Path) -> None:
        """Write the driver, and the samples that were taken and not trained."""
        self.driver.save(folder)
        rest = [{"batch": number, "sample": asdict(one)} for number, one in (*self._handed, *self._left)]
        save_state({"rest": rest}, folder / REST)

    def load(self, folder: Path) -> None:
        """Go on where ``save`` was called. A checkpoint of ``AsyncGRPOTrainer`` itself starts a collector anew."""
        if not (folder / FILE).exists():
            return
        self.driver.load(folder)
        rest = [(one["batch"], RolloutSample(**one["sample"])) for one in load_state(folder / REST)["rest"]]
        groups = dict.fromkeys(sample.group_id for _, sample in rest)
        numbers = {group: number for number, group in enumerate(groups)}  # no gaps: TRL asks for the first one missing
        self._handed.clear()
        self._left = deque((batch, replace(one, group_id=numbers[one.group_id])) for batch, one in rest)
        self._groups = len(numbers)

    def _samples(self, group: Group) -> Iterator[RolloutSample]:
        """Yield what is trained of a group; the baseline is over all its rollouts."""
        rewards = np.array(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
        of = {rollout.index: float(one) for rollout, one in zip(group.rollouts, advantages, strict=True)}
        number, self._groups = self._groups, self._groups + 1
        for rollout in group.trained:
            self.trained[rollout.uid, rollout.index] = of[rollout.index]
            for sample in self.rows[rollout.uid, rollout.index]:
                metrics: Mapping[str, float] = {**sample.metrics, "reward_std": float(rewards.std())}
                yield replace(sample, advantage=of[rollout.index], group_id=number, metrics=metrics)


@dataclass(frozen=True)
class RolloutAsk:
    """One rollout of a row of the data set."""

    place: Place
    row: int
    seed: int


@dataclass(frozen=True)
class Cancel:
    """Groups whose rollouts nobody needs any more."""

    uids: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What became of a rollout: its samples, or the error that it failed with, which may be ``CANCELLED``."""

    place: Place
    samples: tuple[RolloutSample, ...] = ()
    version: int = 0  # of the weights that were served when it began
    tokens: int = 0
    tool_tokens: int = 0
    truncated: bool = False
    error: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)  # of reward functions, since the answer before it


class Inbox:
    """A queue to the child. TRL tries whether its arguments can be pickled before it spawns; a queue refuses that."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def __reduce__(self) -> Any:
        return Inbox, (self.queue if get_spawning_popen() is not None else None,)


class AskedLoop(async_rollout_worker._AsyncRolloutLoop):  # type: ignore[misc]
    """The child's loop: it waits for what is asked."""

    def __init__(self, *, inbox: Inbox, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._inbox = inbox
        self._tasks: dict[Place, asyncio.Task[None]] = {}

    async def _generate_loop(self, stop_event: asyncio.Event) -> None:
        self._places = asyncio.Semaphore(self.max_inflight_tasks)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True, name="goldilocks-asked").start()
        while not stop_event.is_set():
            self._heartbeat_value.value = time.time()  # the parent looks at it to see whether the loop hangs
            await asyncio.sleep(BEAT_S)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _score_loop(self, stop_event: asyncio.Event) -> None:
        """Do nothing: each rollout is scored by its own task."""

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Pass on what is asked, until the parent sends None."""
        while (asked := self._inbox.queue.get()) is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._take, asked)

    def _take(self, asked: RolloutAsk | Cancel) -> None:
        if isinstance(asked, RolloutAsk):
            task = self._tasks[asked.place] = asyncio.get_running_loop().create_task(self._answer(asked))
            task.add_done_callback(lambda _: self._tasks.pop(asked.place, None))
            return
        for place, task in list(self._tasks.items()):
            if place[0] in asked.uids:
                task.cancel()  # closes the connection, so the server stops writing

    async def _answer(self, ask: RolloutAsk) -> None:
        async with self._places:
            turns: list[int] = []
            seed_of_rollout.set(ask.seed)
            turns_of_rollout.set(turns)
            self._inflight = len(self._tasks)
            try:
                answer = await self._rolled_out(ask)
            except asyncio.CancelledError:
                self._send(Answer(ask.place, tokens=sum(turns), error=CANCELLED))
                raise
            except Exception as error:  # a rollout that fails is one lost rollout: the parent counts them
                answer = Answer(ask.place, tokens=sum(turns), error=f"{type(error).__name__}: {error}")
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        self.rollout_buffer.put(replace(answer, costs=spent.read()))

    async def _rolled_out(self, ask: RolloutAsk) -> Answer:
        row, version = self.dataset[ask.row], self.model_version
        tools = {tool.__name__: tool for tool in self._standalone_tools}
        completion, ids, sequences, calls, failures, reward = await self._generate_one(
            row["prompt"], tool_dict=tools, tools=self.tools
        )
        group = RolloutGroup(
            prompts=[row["prompt"]],
            reward_kwargs={key: [value] for key, value in row.items() if key not in OPTIONS},
            completions=[completion],
            completions_ids=[ids],
            completions_sequences=[sequences],
            tool_call_counts=[calls],
            tool_failure_counts=[failures],
            model_version=version,
            group_id=0,  # numbered when the batch is taken
            env_rewards=[None],
            rollout_rewards=[reward],
        )
        samples = await self._score_group(group)
        for sample in samples:
            sample.enqueued_at = time.time()
        ended = bool(ids) and ids[-1] in (*self.eos_token_ids, self.tokenizer.pad_token_id)
        # What a model did not write, behind the first token that it wrote.
        by_tools = sum(mask[mask.index(1) :].count(0) for mask in (one.completion_mask for one in sequences))
        return Answer(ask.place, tuple(samples), version, len(ids), by_tools, truncated=not ended)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        """TRL's; a rollout that fails or is cancelled later has cost these tokens."""
        ids, log_probs = await super()._generate_one_turn(prompt_ids)
        turns_of_rollout.get().append(len(ids))
        return ids, log_probs

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's; the noise of a turn is a function of the rollout's seed, not of what is generated beside it."""
        seed = hashed(seed_of_rollout.get(), len(payload["prompt"]))  # a turn begins behind the turns before it
        return await super()._post(path, {**payload, "seed": seed}, *args, **kwargs)


class AskedWorker(AsyncRolloutWorker):  # type: ignore[misc]
    """The parent's side. ``policy`` returns the batch that the weights being published are trained on next."""

    _loop_cls = AskedLoop
    policy: Callable[[], int]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "queue_maxsize": 0})  # the collector bounds what is asked for
        self.policies: dict[int, int] = {}  # the batch, by the version of the weights
        self._asked = self._mp_ctx.Queue()
        self._asked.cancel_join_thread()  # a child that has died reads nothing, and this process must end all the same
        self._loop_kwargs["inbox"] = Inbox(self._asked)

    def tell(self, asked: RolloutAsk | Cancel) -> None:
        """Have the child do this."""
        self._asked.put(asked)

    def update_model_version(self, model_version: int) -> None:
        self.policies[model_version] = self.policy()
        super().update_model_version(model_version)

    def stop(self) -> None:
        self._asked.put(None)
        super().stop()
