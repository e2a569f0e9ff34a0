"""Speed-ups that are switched off and on while a run goes on, and what each of its steps cost.

``patches.py`` has verl import this module in every process of a run (``VERL_USE_EXTERNAL_MODULES``). A file that all of
them have mapped holds a byte for each switch. The trainer sets the switches of a step before it begins it, so a step
with a patch and one without it stand side by side in one run.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from goldilocks.verl.patches import PATCHES, speed

BOARD, SCHEDULE, STEPS = "PATCH_BOARD", "PATCH_SCHEDULE", "PATCH_STEPS"  # the environment names three files
UNTIL = "PATCH_UNTIL"  # environment: when the run ends at the latest, in seconds since the epoch
SINGLE_TURN = "single-turn"  # no patch: single-turn rollouts many at a time, not by verl's agent loop
MESSAGES = "messages"  # no patch: many requests to a server in one message
STAY = ("one-pass", "v0-trainer")  # the trainer asks whether the first stands, and sends its loss what verl's lacks
NAMES = (*(patch.name for patch in PATCHES if patch.name not in STAY), SINGLE_TURN, MESSAGES)


class Board:
    """What all processes share: the switches, which of them were asked for, and the peak of the GPU's memory."""

    SIZE = 2 * len(NAMES) + 8

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)

    def off(self, name: str) -> bool:
        """Whether it is off. That something asks is noted."""
        place = NAMES.index(name)
        self._bytes[len(NAMES) + place] = 1
        return self._bytes[place] == 1

    def set(self, off: list[str]) -> None:
        """Switch these off and all others on; forget what was asked for, and the peak."""
        self._bytes[:] = bytes(name in off for name in NAMES) + bytes(len(NAMES) + 8)

    @property
    def asked(self) -> list[str]:
        """The switches that something asked for since they were set."""
        return [name for place, name in enumerate(NAMES) if self._bytes[len(NAMES) + place]]

    @property
    def peak(self) -> int:
        """Bytes of the GPU that the training worker held at most."""
        return int(struct.unpack("q", self._bytes[-8:])[0])

    @peak.setter
    def peak(self, value: int) -> None:
        self._bytes[-8:] = struct.pack("q", value)


class Either:
    """The one or the other, by a switch: for what is no function."""

    def __init__(self, choose: Callable[[], Any]) -> None:
        self._choose = choose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._choose()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choose(), name)


def switched(name: str, replace: Callable[[Any], Any], board: Board) -> Callable[[Any], Any]:
    """``replace``, with the original called while the switch is off."""

    def both(original: Any) -> Any:
        ours = replace(original)

        def choose() -> Any:
            return original if board.off(name) else ours

        if not inspect.isfunction(original):
            return Either(choose)

        @functools.wraps(ours)
        def either(*args: Any, **kwargs: Any) -> Any:
            return choose()(*args, **kwargs)

        return either

    return both


class Steps:
    """Writes down what each step cost, and sets the switches of the next."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._schedule: list[list[str]] = json.loads(Path(os.environ[SCHEDULE]).read_text())
        self._number, self._began = -1, 0.0
        self._written = 0.0  # tokens of the run, up to the step before
        self.parts: dict[str, float] = {}  # seconds of the parts of the step, as verl timed them
        self.metrics: dict[str, float] = {}  # of the step

    def begin(self, trainer: Any) -> None:
        """The step before is over; the next begins when this returns."""
        if self._number >= 0:
            step = {"off": self._schedule[self._number], "seconds": time.perf_counter() - self._began}
            written = self.metrics["accounts/generated_tokens"]
            tokens = {"written": written - self._written, "trained": self.metrics["perf/total_num_tokens"]}
            found = {"parts": self.parts, **tokens, "peak": self._board.peak, "asked": self._board.asked}
            self._written = written
            with open(os.environ[STEPS], "a") as file:
                print(json.dumps(step | found), file=file)
        self._number = min(self._number + 1, len(self._schedule) - 1)
        self._board.set(self._schedule[self._number])
        if time.time() > float(os.environ[UNTIL]):
            trainer.total_training_steps = trainer.global_steps
        self._began = time.perf_counter()


def install() -> None:
    """Make every patch a switch before the plug-in applies it."""
    board = Board(os.environ[BOARD])
    for patch in PATCHES:
        if patch.name in NAMES:
            both = {attribute: switched(patch.name, ours, board) for attribute, ours in patch.replaced.items()}
            object.__setattr__(patch, "replaced", both)
    reduce = speed.PackedRows.__reduce__
    speed.PackedRows.__reduce__ = lambda rows: (unpack, reduce(rows)[1])  # type: ignore[method-assign]
    from goldilocks.verl import plugin

    due = next(finder for finder in sys.meta_path if isinstance(finder, plugin._AfterImport))._due
    due.setdefault("verl.trainer.ppo.v1.trainer_base", []).append(functools.partial(_count_steps, board))
    due.setdefault("verl.trainer.ppo.v1.agent_loop_tq", []).append(functools.partial(_switch_in_workers, board))
    due.setdefault("verl.workers.engine_workers", []).append(functools.partial(_measure_memory, board))


def _count_steps(board: Board) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    steps: list[Steps] = []  # of the one trainer that this process may have
    compute = PPOTrainer._compute_metrics

    def on_step_begin(self: Any) -> None:
        if not steps:
            steps.append(Steps(board))
        steps[0].begin(self)

    def _compute_metrics(self: Any, batch: Any, metrics: Any, timing_raw: dict[str, float], **others: Any) -> None:
        steps[0].parts, steps[0].metrics = dict(timing_raw), metrics
        compute(self, batch, metrics, timing_raw, **others)

    PPOTrainer.on_step_begin = on_step_begin
    PPOTrainer._compute_metrics = _compute_metrics


def _switch_in_workers(board: Board) -> None:
    """Our worker may have begun to be imported before this module was, so its class is met when one is made."""
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    base = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    begin = base.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from goldilocks.verl.dispatch import client

        begin(self, *args, **kwargs)
        many = client.exchanged
        client.exchanged = lambda *given: (_one_by_one if board.off(MESSAGES) else many)(*given)
        type(self).single_turn = property(  # our worker sets it next, and reads it for every prompt
            lambda self: None if board.off(SINGLE_TURN) else self.set_single_turn,
            lambda self, made: setattr(self, "set_single_turn", made),
        )

    base.__init__ = __init__


async def _one_by_one(server: Any, requests: Any) -> AsyncIterator[list[tuple[str, Any]]]:
    """As ``messages.exchanged``, by a call for each request."""

    async def answer(name: str, prompt: list[int], params: dict[str, Any]) -> list[tuple[str, Any]]:
        try:
            return [(name, await server.generate.remote(request_id=name, prompt_ids=prompt, sampling_params=params))]
        except Exception as error:
            return [(name, error)]

    for one in asyncio.as_completed([answer(*request) for request in requests]):
        yield await one


def _measure_memory(board: Board) -> None:
    import torch
    from verl.workers.engine_workers import TrainingWorker

    train = TrainingWorker.train_mini_batch

    @functools.wraps(train)  # with what verl's decorator has noted on it
    def train_mini_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            return train(self, *args, **kwargs)
        torch.cuda.reset_peak_memory_stats()
        output = train(self, *args, **kwargs)
        board.peak = torch.cuda.max_memory_allocated()
        return output

    TrainingWorker.train_mini_batch = train_mini_batch


def unpack(*packed: Any) -> Any:
    """As ``speed.unpack``: a storage unit imports nothing of verl, and becomes switched by what it is sent."""
    return speed.unpack(*packed)


if BOARD in os.environ:
    install()
