"""Patches that are switched off and on while a run goes on, and what each of its steps cost.

``patches.py`` has verl import this module in every process of a run (``VERL_USE_EXTERNAL_MODULES``). A file that all of
them have mapped holds one byte for each switch. The trainer sets the switches of a step before it begins it, so a step
with a patch and one without it stand side by side in one run.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from goldilocks.verl.patches import PATCHES, rows

# The environment names four files.
SWITCHES, SCHEDULE, STEPS, CALLERS = "PATCH_SWITCHES", "PATCH_SCHEDULE", "PATCH_STEPS", "PATCH_CALLERS"
UNTIL = "PATCH_UNTIL"  # environment: when the run ends at the latest, in seconds since the epoch
BATCHED_TURNS = "batched-single-turn"  # no patch: single-turn rollouts many at a time, not by verl's loop
NAMES = (*(patch.name for patch in PATCHES), BATCHED_TURNS)
IN_TRAINER = ("one-pass",)  # the trainer asks whether it stands, so it is switched in the trainer


class Board:
    """The switches, shared by all processes."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)
        self._asked: set[str] = set()

    def off(self, name: str) -> bool:
        """Whether it is off. That this process asks is noted, once."""
        if name not in self._asked:
            self._asked.add(name)
            with open(os.environ[CALLERS], "a") as file:
                file.write(f"{name} {os.getpid()}\n")
        return self._bytes[NAMES.index(name)] == 1

    def set(self, off: list[str]) -> None:
        """Switch these off and all others on."""
        self._bytes[:] = bytes(name in off for name in NAMES)


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


def cpu_seconds(token: str) -> dict[int, float]:
    """The processor time of every process that has ``token`` in its environment, by process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if token.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = time.clock_gettime((~int(entry.name) << 3) | 2)  # its clock: Linux
            except OSError:
                continue  # it has ended, or is another's
    return found


class Steps:
    """Writes down what each step cost, and sets the switches of the next."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._schedule: list[list[str]] = json.loads(Path(os.environ[SCHEDULE]).read_text())
        self._number, self._before = -1, (0.0, dict[int, float]())

    def begin(self, trainer: Any) -> None:
        """The step before is over; the next begins when this returns."""
        wall, cpu = time.perf_counter(), cpu_seconds(os.environ[SWITCHES])
        off = self._schedule[min(self._number + 1, len(self._schedule) - 1)]
        self._board.set(off)
        if self._number >= 0:
            spent = {process: seconds - self._before[1].get(process, 0.0) for process, seconds in cpu.items()}
            step = {"wall": wall - self._before[0], "cpu": spent}
            with open(os.environ[STEPS], "a") as file:
                print(json.dumps(step), file=file)
        self._in_trainer(trainer, off)
        if time.time() > float(os.environ[UNTIL]):
            trainer.total_training_steps = trainer.global_steps
        self._number += 1
        self._before = time.perf_counter(), cpu_seconds(os.environ[SWITCHES])

    def _in_trainer(self, trainer: Any, off: list[str]) -> None:
        if self._number < 0:
            self._one_pass = trainer.one_pass
        none = dataclasses.replace(self._one_pass, own_log_probs=False, rows_with_signal=False)
        trainer.one_pass = none if "one-pass" in off else self._one_pass


def install() -> None:
    """Make every patch a switch before the plug-in applies it."""
    board = Board(os.environ[SWITCHES])
    for patch in PATCHES:
        if patch.name not in IN_TRAINER:
            both = {attribute: switched(patch.name, ours, board) for attribute, ours in patch.replaced.items()}
            object.__setattr__(patch, "replaced", both)
    reduce = rows.PackedRows.__reduce__
    rows.PackedRows.__reduce__ = lambda rows: (unpack, reduce(rows)[1])  # type: ignore[method-assign]
    from goldilocks.verl import plugin

    due = next(finder for finder in sys.meta_path if isinstance(finder, plugin._AfterImport))._due
    due.setdefault("verl.trainer.ppo.v1.trainer_base", []).append(functools.partial(_count_steps, board))
    due.setdefault("verl.trainer.ppo.v1.agent_loop_tq", []).append(functools.partial(_switch_batched_turns, board))


def _count_steps(board: Board) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    steps: list[Steps] = []  # of the one trainer that this process may have

    def on_step_begin(self: Any) -> None:
        if not steps:
            steps.append(Steps(board))
        steps[0].begin(self)

    PPOTrainer.on_step_begin = on_step_begin


def _switch_batched_turns(board: Board) -> None:
    """Our worker may have begun to be imported before this module was, so its class is met when one is made."""
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    base = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    begin = base.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        is_batched = self._is_batched
        self._is_batched = lambda prompt: not board.off(BATCHED_TURNS) and is_batched(prompt)

    base.__init__ = __init__


def unpack(*packed: Any) -> Any:
    """As ``rows.unpack``: a storage unit imports nothing of verl, and becomes switched by what it is sent."""
    return rows.unpack(*packed)


if SWITCHES in os.environ:
    install()
