"""TRL's rollout worker, told which rollouts to generate: one task for each, in TRL's own child process.

TRL's loop goes through the data and hands out scored groups of one size. Here the collector asks for single rollouts
and cancels those that nobody needs; conversation, tools, requests to the server and reward functions are TRL's. A
rollout is scored by itself, since the size of its group is not known yet; its advantage is computed with the batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from multiprocessing.context import get_spawning_popen
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    _AsyncRolloutLoop,
)

from goldilocks.drive.backend import CANCELLED
from goldilocks.drive.rows import Place
from goldilocks.hashing import hashed
from goldilocks.rewards import spent

BEAT_S = 0.1  # between two signs of life, and before the end of a run is seen
OPTIONS = ("prompt", "completion", "completion_ids")  # columns that reward functions get under names of TRL's own
seed_of_rollout: ContextVar[int] = ContextVar("seed_of_rollout")  # each task has its own
turns_of_rollout: ContextVar[list[int]] = ContextVar("turns_of_rollout")  # the tokens of each turn that is finished


@dataclass(frozen=True)
class Ask:
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


class AskedLoop(_AsyncRolloutLoop):  # type: ignore[misc]
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

    def _take(self, asked: Ask | Cancel) -> None:
        if isinstance(asked, Ask):
            task = self._tasks[asked.place] = asyncio.get_running_loop().create_task(self._answer(asked))
            task.add_done_callback(lambda _: self._tasks.pop(asked.place, None))
            return
        for place, task in list(self._tasks.items()):
            if place[0] in asked.uids:
                task.cancel()  # closes the connection, so the server stops writing

    async def _answer(self, ask: Ask) -> None:
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

    async def _rolled_out(self, ask: Ask) -> Answer:
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
        by_tools = sum(_between(sequence.completion_mask) for sequence in sequences)
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


def _between(mask: Sequence[int]) -> int:
    """Return how many tokens a model did not write, behind the first that it wrote."""
    return mask[mask.index(1) :].count(0)


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

    def tell(self, *asked: Ask | Cancel) -> None:
        """Have the child do this."""
        for one in asked:
            self._asked.put(one)

    def update_model_version(self, model_version: int) -> None:
        self.policies[model_version] = self.policy()
        super().update_model_version(model_version)

    def stop(self) -> None:
        self._asked.put(None)
        super().stop()
