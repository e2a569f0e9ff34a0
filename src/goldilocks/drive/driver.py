"""The loop between "I need a batch" and "here it is", for every trainer.

    fill → take → judge → refill → hand out → end of step → save

The collector decides, the backend generates, the rows wait in a store, the gate judges what was taken. A trainer calls
``batch`` once a step; one that computes log-probs before its gate can judge calls ``take``, then ``settle``.

Invariants:

- every group of a batch is judged once, but for dropped ones that fill the batch up, which are known to teach nothing;
- nothing is being generated when ``batch`` returns, unless the backend never pauses;
- a run that is saved between two steps and loaded again goes on with the same batches.

Epochs are passes over the data, counted in prompts issued; updates are another clock.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from goldilocks.core import Collector, Exhausted
from goldilocks.core.accounts import Accounts
from goldilocks.core.filters import Everything
from goldilocks.core.limits import Budget
from goldilocks.drive.backend import Backend
from goldilocks.drive.gate import Gate, Metrics
from goldilocks.drive.rows import RowStore
from goldilocks.errors import require
from goldilocks.rewards import RewardFailed
from goldilocks.runs.checkpoints import FILE, load_state, save_state
from goldilocks.runs.costs import closing
from goldilocks.types import Event, Failure, Group, is_informative, outcome

logger = logging.getLogger(__name__)

MAX_REFILLS = 32  # of one batch: a gate that rejects this often rejects everything
MAX_FAILURES = 64  # in a row: it is not bad luck any more
FLAT_BATCHES, FLAT_GROUPS = 4, 64  # generation batches, and groups, without one that is kept, after which it is said
FLAT = (
    "the last %d groups were all dropped, and the keep rate is %.4f: update %d may never come. Look at the reward "
    "function, the data and filter/dropped/* of the last step; algorithm.filter_groups.max_num_gen_batches ends such "
    "a run"
)
ALIKE = (
    "%d of the %d groups of this batch have only failures, or only passes (a reward of %g or more), and passed the "
    "filter: their rewards differ by something else, such as the length, and that is trained. Return acc, 0 or 1, from "
    "the reward function, and leave algorithm.filter_groups.metric out or name acc"
)
ENDS_THE_RUN = RewardFailed.__name__  # the reason of a failure after which a run must not go on
ROWS = "goldilocks_rows"  # begins the name of the folder of rows in a checkpoint
OWN = ("collector", "rows", "meter", "backend", "gate")  # the names in a checkpoint that the driver writes
TIMED = tuple(f"timing_s/gen_{part}" for part in ("submit", "wait", "pause", "drain", "clear"))
GRADED_GROUPS = 16  # groups of a step whose rewards differ: by then a fitting threshold has been passed and missed
ONE_SIDED = (
    "%s reward of this step is at or above adaptive_rollout.positive_threshold=%g, although rewards differ: selectors "
    "and stop rules that count passes learn nothing. Set the least reward that is a success (docs/rewards.md)"
)


class Stalled(Exception):
    """Nothing is being generated, and the batch is not full or rollouts have not come back."""


class Driver:
    """Fills one batch after the other."""

    def __init__(
        self,
        collector: Collector,
        backend: Backend,
        rows: RowStore[Any],
        gate: Gate | None = None,
        *,
        budget: Budget | None = None,
        epochs: Epochs | None = None,
        max_failures: float = MAX_FAILURES,
    ) -> None:
        self.collector = collector
        self.backend = backend
        self.rows = rows
        self.gate = gate
        self.meter = Meter(budget or Budget(), collector.accounts)
        self.epochs = epochs or Epochs(collector)
        self.watch = Stopwatch()
        self._max_failures = max_failures
        self._flat_least = max(FLAT_BATCHES * collector.gen_batch_size, FLAT_GROUPS)
        self._flat_limit = self._flat_least  # groups in a row without one kept, after which FLAT is said
        self._threshold_checked = False  # by the first step with enough groups whose rewards differ
        self._alike_said = False
        self._judgements: list[Metrics] = []  # of this update's batches
        self._ends_by = ""  # why the run ends when it would generate on; empty: it goes on

    # -- a batch -------------------------------------------------------------------------------------------------------

    def batch(self, *, more: bool = False) -> tuple[Group, ...]:
        """Return the groups to train: of the next update, or ``more`` of this one. Raises ``Exhausted`` if too few."""
        self.take(more=more)
        return self.settle()

    def take(self, *, more: bool = False) -> tuple[Group, ...]:
        """Fill a batch, of the next update or ``more`` of this one, and return it, not judged yet."""
        if more:
            self.collector.extend()
        else:
            self._judgements = []
            if self.collector.owed:  # what is in hand is of an update that was cut short, as by Ctrl-C
                self.collector.put_back()
        return self._fill_and_take()

    def settle(self) -> tuple[Group, ...]:
        """Replace what the gate refuses of the batch in hand until no group is missing; return the groups to train."""
        if self.gate is None:
            return self.collector.in_hand
        self._judge(self.gate, self.collector.in_hand)
        refills = 0
        while self.collector.owed:
            if refills == MAX_REFILLS:
                raise Exhausted(
                    f"After {MAX_REFILLS} refills {self.collector.owed} groups are missing: the gate rejects too much. "
                    "Look at its metrics and thresholds; algorithm.filter_groups.max_num_gen_batches bounds generation."
                )
            refills += 1
            if self.collector.ready:  # surplus suffices
                groups = self.collector.take()
            else:
                with self.backend.refilling():
                    groups = self._fill_and_take()
            self._judge(self.gate, groups)
        self._free_rows()
        return self.collector.in_hand

    def put_back(self) -> None:
        """Let all batches of the update wait again: they were not trained after all."""
        self.collector.put_back()

    def _judge(self, gate: Gate, groups: Sequence[Group]) -> None:
        if groups:
            gate.prepare(groups)
        backfilled = self.collector.backfilled
        judged = [group for group in groups if group.uid not in backfilled]
        if judged:
            refused, cut, metrics = gate.judge(judged)
            lost = self.collector.reject(refused, gate.reason, flat=gate.refuses_flat)
            self.collector.trim({uid: indices for uid, indices in cut.items() if uid not in lost})
            self._judgements.append(metrics)

    # -- generation ----------------------------------------------------------------------------------------------------

    def _fill_and_take(self) -> tuple[Group, ...]:
        """Ask, and take in what happens, until there is a batch; return its groups when nothing is being generated."""
        if self.collector.surplus.pauses:
            self.backend.resume()
        while not self.collector.ready:
            with self.watch.timed("submit"):
                self.backend.submit(self.collector.requests(self.backend.room))
            if not self.collector.ready and not self._wait():
                raise Stalled("the batch is not full, and nothing is being generated for it")
            self._warn_of_flat_groups()
        groups = self.collector.take()
        self._stop()
        return groups

    def _warn_of_flat_groups(self) -> None:
        """Say that nothing is kept, and again each time that twice as much was generated in vain."""
        flat = self.collector.flat_in_a_row
        if flat >= self._flat_limit:
            self._flat_limit = 2 * flat
            logger.warning(FLAT, flat, self.collector.keep_rate, self.collector.step)
        elif not flat:
            self._flat_limit = self._flat_least

    def _stop(self) -> None:
        """Wait until nothing is being generated, since the trainer is about to train; free rows that no batch needs."""
        self._cancel()
        if self.collector.surplus.pauses:
            with self.watch.timed("pause"):
                paused = self.backend.pause()
            self.observe(paused)
        while self.collector.in_flight and not self.collector.surplus.pauses:
            if not self._wait():
                raise Stalled(f"{self.collector.in_flight} rollouts are in flight, and nothing is being generated")
        with self.watch.timed("drain"):
            self.backend.drain()
        self.collector.accounts.charge(self.backend.rewards_spent())
        self._wait(within=0.0)  # what the cancelled ones have cost
        self._free_rows()

    def _wait(self, within: float | None = None) -> int:
        """Wait for something to happen and take it in; return how many events there were."""
        with self.watch.timed("wait"):
            events = self.backend.events(within)
        return self.observe(events)

    def observe(self, events: Iterable[Event]) -> int:
        """Tell the collector what has happened; return how many events there were. Raise if the run ends by them."""
        seen = 0
        for event in events:
            self._take_in(event)
            seen += 1
            if self._ends_by:
                break
        if self._ends_by:
            raise RuntimeError(self._ends_by)
        self._cancel()
        return seen

    def _take_in(self, event: Event) -> None:
        self.collector.observe(event)
        last, many = self.collector.last_failure, self.collector.failures_in_a_row
        if isinstance(event, Failure) and event.reason == ENDS_THE_RUN:
            self._ends_by = f"goldilocks.rewards.on_failure=error: {self.backend.explain(event)}"
        elif last is not None and many >= self._max_failures:
            self._ends_by = f"{many} rollouts failed in a row; {self.backend.explain(last)}"

    def _cancel(self) -> None:
        if uids := self.collector.cancelled():
            self.backend.cancel(uids)

    def _free_rows(self) -> None:
        with self.watch.timed("clear"):
            self.rows.retain(self.collector.alive)

    # -- the end of a step ---------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the run ends with this update: its budget is spent, or its epochs are over."""
        return self.meter.share >= 1 or self.epochs.over

    def metrics(self) -> dict[str, float]:
        """Return the collector's metrics, those of all judgements of the update together, and the budget's."""
        trained = self.collector.trained
        judged = {} if self.gate is None else self.gate.combined(self._judgements, trained, self.collector.batches)
        plain = {name: float(value) for name, value in judged.items()}  # a mean knows its count, and loggers refuse it
        own = self.collector.metrics()
        self._check_threshold(own)
        self._check_filter(trained)
        return {**own, **plain, **({"budget/spent": self.meter.share} if self.meter.budget.costs else {})}

    def closing(self) -> str:
        """Return the last line of a run; every trainer prints it."""
        collector = self.collector
        return f"Goldilocks: rollouts: {closing({**collector.accounts.metrics(), **collector.selector.metrics()})}"

    def _check_threshold(self, metrics: Mapping[str, float]) -> None:
        """Warn once where all rewards of a step are on one side of the threshold: nothing is learnt of the prompts."""
        passed, rollouts = metrics["difficulty/pass_rate"], metrics["adaptive_rollout/total_rollouts"]
        informative = metrics["adaptive_rollout/informative_groups_per_1k_rollouts"] * rollouts / 1000
        if not self._threshold_checked and round(informative) >= GRADED_GROUPS:
            self._threshold_checked = True
            if passed in (0, 1):
                logger.warning(ONE_SIDED, "every" if passed else "no", self.collector.beliefs.positive_threshold)

    def _check_filter(self, trained: Sequence[Group]) -> None:
        """Warn once where groups of failures alone, or of passes alone, pass the filter: it judges something else."""
        filtered = self.gate is not None or not isinstance(self.collector.filter, Everything)
        differ = filter(is_informative, trained) if filtered and not self._alike_said else ()
        least = self.collector.beliefs.positive_threshold
        alike = sum(len({outcome(one, None) >= least for one in group.rollouts}) == 1 for group in differ)
        if alike:
            self._alike_said = True
            logger.warning(ALIKE, alike, len(trained), least)

    # -- a checkpoint --------------------------------------------------------------------------------------------------

    def save(self, folder: Path, **also: Any) -> None:
        """Write everything that is not the trainer's own into the folder of its checkpoint; ``also`` goes with it.

        The rows are written first, under a name of their own, and the state names the rows it goes with. A run that
        ends while it writes over an older checkpoint leaves the older state with the older rows.
        """
        if self.collector.surplus.pauses:
            for event in self.backend.up_to_saved_moment():
                self._take_in(event)  # what ends the run does so when it would generate on: the weights are saved first
            self._cancel()
        # Since the last batch: of a validation, or of a batch that could not be filled.
        self.collector.accounts.charge(self.backend.rewards_spent())
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        for name in also:
            require(name not in OWN, "also", name, f"another name; the driver saves {', '.join(OWN)}")
        before = {old.name: old for old in folder.glob(f"{ROWS}*")}
        number = self.collector.accounts.generated_rollouts
        while (rows := f"{ROWS}_{number}") in before:  # of the older state, or of a save that was cut
            number += 1
        self.rows.save(self.collector.waiting_rollouts, folder / rows)
        save_state({"collector": self.collector.state_dict(), "rows": rows, **parts, **also}, folder / FILE)
        for old in before.values():
            shutil.rmtree(old)

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on where ``save`` was called; return what was written, ``also`` included. What was in flight is lost.

        Loading executes no code.
        """
        state = load_state(folder / FILE)
        self.collector.load_state_dict(state["collector"])
        self.collector.reissue(known=self.rows.load(folder / state["rows"]))
        for name, part in self._parts.items():
            if state.get(name):  # a run may go on with a gate that it did not have
                part.load_state_dict(state[name])
        return state

    @property
    def _parts(self) -> dict[str, Any]:
        return {"meter": self.meter, "backend": self.backend, **({} if self.gate is None else {"gate": self.gate})}


class Epochs:
    """How far a run is through its data, and whether it ends with them."""

    def __init__(self, collector: Collector, total: int | None = None) -> None:
        """``total``: the epochs that end the run; None: something else ends it."""
        self._collector = collector
        self.size = len(collector.source)
        collector.last_prompt = math.inf if total is None else total * self.size

    @property
    def current(self) -> int:
        """The epoch of the next prompt, from 0."""
        return self._collector.prompts_issued // self.size

    @property
    def over(self) -> bool:
        """Whether the prompts that are left or begun, with the groups that wait, cannot fill another batch."""
        collector = self._collector
        step = collector.step if collector.owed else collector.step + 1
        oldest = step - collector.surplus.max_carry_steps
        waiting = sum(group.version >= oldest for group in collector.kept)  # others expire before they are trained
        left = max(collector.last_prompt - collector.prompts_issued, 0)
        return left + collector.begun < collector.target_groups - waiting


class Meter:
    """How far a run is through its budget; the counts survive a restart.

    Every generated rollout is charged, also dropped, cancelled and failed ones. Seconds are those of the updates,
    without the start and without validation.
    """

    def __init__(self, budget: Budget, accounts: Accounts) -> None:
        self.budget = budget
        self._accounts = accounts
        self._seconds = 0.0  # of the updates before this one
        self._began: float | None = None
        self._validated = 0  # how many of the evenly spread validations have been due
        self.updates = 0  # that this process has begun

    def begin_update(self) -> None:
        self._began, self.updates = time.monotonic(), self.updates + 1

    def end_update(self) -> float:
        """Return the seconds of the update."""
        before, self._seconds, self._began = self._seconds, self.seconds, None
        return self._seconds - before

    @property
    def seconds(self) -> float:
        """Return the seconds spent on updates, the current one included."""
        return self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    @property
    def share(self) -> float:
        """Return the share of the budget that is spent; 1 or more is all of it."""
        spent = {
            "rollouts": self._accounts.generated_rollouts,
            "tokens": self._accounts.generated_tokens,
            "seconds": self.seconds,
        }
        return max((spent[cost] / amount for cost, amount in self.budget.costs.items()), default=0.0)

    def validation_due(self) -> bool:
        """Return whether another of the evenly spread validations is due; true once for each."""
        before, self._validated = self._validated, math.floor(self.share * (self.budget.validations or 0))
        return self._validated > before

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "validated": self._validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seconds, self._validated = state["seconds"], state["validated"]


class Stopwatch:
    """Adds up the seconds of a generation, by what they were spent on, until they are read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time inside as spent on this part."""
        metric, started = f"timing_s/gen_{part}", time.perf_counter()
        assert metric in TIMED, metric
        try:
            yield
        finally:
            self._seconds[metric] = self._seconds.get(metric, 0.0) + time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """Return the seconds since the last reading, by metric."""
        seconds, self._seconds = self._seconds, {}
        return seconds
