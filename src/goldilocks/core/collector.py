"""The state machine over groups: ``open → (more rollouts)* → kept | dropped(reason)``.

    while not collector.ready:
        for request in collector.requests(room=engine.free):
            engine.submit(request)
        for rollout in engine.step():
            collector.observe(rollout)
        for uid in collector.cancelled():
            engine.abort(uid)
    batch = collector.take()

Decisions are made when a rollout arrives, never by scanning all prompts or all groups. What it keeps:

- a batch has exactly the groups that were asked for, whole, in the order their prompts were issued;
- no limit is ever exceeded;
- every rollout that arrived is in exactly one account;
- the decisions are a function of the seed and of what was observed, across any number of saves and loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from goldilocks.core.accounts import Accounts
from goldilocks.core.allocators import Allocator
from goldilocks.core.filters import Filter
from goldilocks.core.informative import is_informative, signal
from goldilocks.core.keep_rate import KeepRate
from goldilocks.core.ledger import Ledger
from goldilocks.core.limits import Limits, Surplus
from goldilocks.core.packing import pack_visit, unpack_visit
from goldilocks.core.pool import Pool
from goldilocks.core.prompt_queue import PromptQueue
from goldilocks.core.selectors import Selector
from goldilocks.core.shelf import Shelf, issue_order
from goldilocks.core.source import KeyedPositions, Source
from goldilocks.core.step_statistics import Statistics
from goldilocks.core.visit import Visit
from goldilocks.errors import require
from goldilocks.types import Failure, Group, Prompt, Request, Rollout, Verdict


class Exhausted(ValueError):
    """The limits, or the data, leave too few groups for a batch. Nothing is lost: the state can be saved as it is."""


class Collector:
    """Collects ``target_groups`` groups a step. The module's docstring has the loop that drives it."""

    def __init__(
        self,
        source: Source,
        selector: Selector,
        allocator: Allocator,
        filter: Filter,
        *,
        target_groups: int,
        gen_batch_size: int | None = None,
        limits: Limits | None = None,
        surplus: Surplus | None = None,
        ledger: Ledger | None = None,
        repeat: bool = True,
        order: Callable[[int], np.ndarray] | None = None,
        seed: int = 1,
    ) -> None:
        """``gen_batch_size`` prompts are chosen at a time (default: ``target_groups``), and no more are open at once.

        ``repeat=False``: no prompt is visited twice. ``order`` gives each epoch's pass, where someone else shuffles.
        """
        size = len(source)
        require(size > 0, "source", f"{size} prompts", "a data set with at least one prompt")
        require(target_groups >= 1, "target_groups", target_groups, "1 or more")
        require(repeat or target_groups <= size, "target_groups", target_groups, f"at most {size} without repeats")
        require(gen_batch_size is None or gen_batch_size >= 1, "gen_batch_size", gen_batch_size, "1 or more")
        self.source = source
        self.selector = selector
        self.allocator = allocator
        self.filter = filter
        self.target_groups = target_groups
        self.gen_batch_size = gen_batch_size or target_groups
        self.limits = limits or Limits()
        self.surplus = surplus or Surplus()
        self.ledger = ledger or Ledger(source.keys())
        self.accounts = Accounts()
        self.step = 0
        self.prompts_issued = 0

        pool = Pool(size, seed=seed, repeat=repeat, order=order)
        spare = target_groups if self.limits.on_exhausted == "backfill" else 0
        self._pool = pool
        self._queue = PromptQueue(pool, selector, allocator, self.ledger, batch=self.gen_batch_size, seed=seed)
        self._shelf = Shelf(self.accounts, pool, spare=spare)
        self._keep_rate = KeepRate(min(1.0, target_groups / self.gen_batch_size))
        self._statistics = Statistics()
        self._owed = target_groups  # groups this step has yet to hand out; 0 while its batch is being trained
        self._exhausted = False
        self._open: dict[str, Visit] = {}
        self._unsent: dict[str, None] = {}  # open groups with something to send, in the order they wanted it
        self._unsent_rollouts = 0
        self._in_flight = 0
        self._cancelled: list[str] = []

    # -- what to do ----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether ``take`` has a batch to hand out. Looking, after a batch was taken, begins the next step."""
        self._begin_step()
        return len(self._shelf) >= self._owed or (self._exhausted and self.limits.on_exhausted != "error")

    def requests(self, room: int | None = None) -> list[Request]:
        """What to generate now, at most ``room`` rollouts (None: no bound).

        Raises ``Exhausted`` when nothing is left to wait for and the batch cannot be filled.
        """
        self._begin_step()
        left = math.inf if room is None else room
        sent = self._send(left)
        left -= sum(request.n for request in sent)
        while left > 0 and self._shortfall() > 0 and self._open_next():
            more = self._send(left)
            left -= sum(request.n for request in more)
            sent.extend(more)
        if not sent and not self._in_flight and left > 0:
            return self._settle(room)
        return sent

    def cancelled(self) -> list[str]:
        """Groups whose rollouts in flight are no longer needed, since this was last asked."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def take(self) -> tuple[Group, ...]:
        """The batch: the groups owed, in the order their prompts were issued, not in which they finished."""
        if not self.ready:
            raise ValueError(f"the batch is not ready: {len(self._shelf)} of {self._owed} groups are there")
        groups = self._shelf.take(self._owed, self._trim)
        if len(groups) < self._owed:
            backfilled = self._shelf.backfill(self._owed - len(groups), self._trim)
            self._statistics.backfilled += len(backfilled)
            groups += backfilled
        if not groups and not self._shelf.in_hand:
            raise Exhausted(self._why_exhausted())
        self._owed = 0
        self._requeue_open()
        return tuple(groups)

    # -- what happened -------------------------------------------------------------------------------------------------

    def observe(self, event: Rollout | Failure) -> None:
        """A rollout arrived, or never will. Late and duplicate ones are counted and go no further."""
        visit = self._open.get(event.uid)
        if visit is None or event.index not in visit.in_flight:
            self._observe_unexpected(event, visit)
            return
        visit.in_flight.remove(event.index)
        self._in_flight -= 1
        self._statistics.tokens_arrived += event.tokens
        if isinstance(event, Failure) or not _finite(event):
            visit.failures += 1
            self._statistics.fail(event.reason if isinstance(event, Failure) else "non_finite_reward")
            self.accounts.post("failed", event.tokens)
        else:
            visit.arrive(event)
            self.accounts.post("open", event.tokens)
        self._decide(visit)

    def reject(self, uids: Iterable[str] | Mapping[str, Collection[int]], reason: str) -> tuple[str, ...]:
        """Take back groups of the batch in hand, or kept ones: whole, or the rollouts named for each.

        What is left of a group is judged again. Those that no longer pass are returned: they are not to be trained, and
        ``take`` hands out as many in their place once ``ready``. To be called before ``ready`` begins the next step.
        """
        rows = dict(uids) if isinstance(uids, Mapping) else dict.fromkeys(uids)
        return tuple(uid for uid, indices in rows.items() if self._reject(uid, indices, reason))

    def put_back(self) -> None:
        """The batch in hand was not trained after all: its groups wait again."""
        self._owed += self._shelf.put_back()

    def reissue(self) -> None:
        """Ask again for everything in flight: the engine has forgotten it (it was restarted)."""
        for visit in self._open.values():
            if visit.in_flight:
                self._statistics.rollouts_asked -= len(visit.in_flight)
                self._want(visit, len(visit.in_flight))
                visit.in_flight.clear()
        self._in_flight = 0

    # -- what there is to see ------------------------------------------------------------------------------------------

    @property
    def kept(self) -> tuple[Group, ...]:
        """Groups that wait to be taken, in the order their prompts were issued."""
        return self._shelf.kept

    @property
    def owed(self) -> int:
        """How many groups the current step has yet to hand out."""
        return self._owed

    @property
    def in_hand(self) -> tuple[Group, ...]:
        """The batch in hand: what ``take`` handed out and ``reject`` left."""
        return self._shelf.in_hand

    @property
    def waiting_rollouts(self) -> list[Rollout]:
        """Every rollout whose payload a later batch may need: those of open groups and of kept ones."""
        groups = [*(visit.rollouts for visit in self._open.values()), *(group.rollouts for group in self._shelf.kept)]
        return [rollout for rollouts in groups for rollout in rollouts]

    @property
    def alive(self) -> set[str]:
        """The groups whose payloads are still needed: open, kept, or in the batch in hand."""
        return {*self._open, *self._shelf.uids}

    @property
    def open_groups(self) -> int:
        """How many groups wait for rollouts."""
        return len(self._open)

    @property
    def in_flight(self) -> int:
        """How many rollouts the engine was asked for and has not returned."""
        return self._in_flight

    def metrics(self) -> dict[str, float]:
        """The current step's metrics and the running accounts."""
        return {
            **self._statistics.metrics(self.gen_batch_size),
            "train/keep_rate": self._keep_rate.value,
            "train/groups_carried": len(self._shelf),
            "train/groups_open": len(self._open),
            "train/informative_groups": sum(map(is_informative, self.in_hand)),
            "train/signal": math.fsum(map(signal, self.in_hand)),
            "data/epoch": self.prompts_issued / len(self.source),
            "data/prompts_issued": self.prompts_issued,
            **self.accounts.metrics(),
            **self.selector.metrics(),
            **self.allocator.metrics(),
            **self.filter.metrics(),
        }

    # -- a step --------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._owed:
            return
        self.step += 1
        self._owed = self.target_groups
        self._exhausted = False
        self._keep_rate.forget()
        self._statistics = Statistics()
        self._statistics.expired = self._shelf.begin_step(oldest=self.step - self.surplus.max_carry_steps)

    def _requeue_open(self) -> None:
        """The batch is full: groups that may not finish, or would be too old by then, go back to the queue's head."""
        oldest = self.step + 1 - self.surplus.max_carry_steps
        requeue = self.surplus.on_full == "requeue"
        stopped = [visit for visit in self._open.values() if requeue or visit.version < oldest]
        for visit in reversed(stopped):
            self._stop(visit)
            self.accounts.move("open", "cancelled", len(visit.rollouts), visit.view().tokens)
            self._queue.put_back(visit.prompt.index, visit.planned)

    def _trim(self, group: Group) -> Collection[Rollout]:
        return self.allocator.trained(group, self.ledger)

    # -- opening groups ------------------------------------------------------------------------------------------------

    def _shortfall(self) -> int:
        """How many more prompts to issue: what is missing over the keep rate, within what may be open and issued."""
        missing = self._owed - len(self._shelf)
        if missing <= 0 or self._exhausted:
            return 0
        needed = math.ceil(missing / self._keep_rate.value - 1e-9)
        return min(min(needed, self.gen_batch_size) - len(self._open), self._prompts_left())

    def _prompts_left(self) -> int:
        if self.limits.max_num_gen_batches <= 0:
            return self.gen_batch_size
        return self.limits.max_num_gen_batches * self.gen_batch_size - self._statistics.prompts_issued

    def _rollouts_left(self) -> float:
        """How many rollouts the step's limits leave; each one in flight is reserved its longest length."""
        left, limits = math.inf, self.limits
        if limits.max_rollouts_per_step is not None:
            left = limits.max_rollouts_per_step - self._statistics.rollouts_asked
        if limits.max_tokens_per_step is not None and limits.max_tokens_per_rollout is not None:
            tokens = limits.max_tokens_per_step - self._statistics.tokens_arrived
            left = min(left, tokens // limits.max_tokens_per_rollout - self._in_flight)
        return left

    def _open_next(self) -> bool:
        """Open a group for the next prompt; False when there is none, or no budget for its first ask."""
        head = self._queue.head()
        if head is None or head[1] > self._rollouts_left() - self._unsent_rollouts:
            return False
        index, n = self._queue.pop()
        visit = Visit(f"g{self.prompts_issued}", self.source[index], planned=n, version=self.step)
        self._open[visit.uid] = visit
        self.prompts_issued += 1
        self._statistics.prompts_issued += 1
        self._want(visit, n)
        return True

    # -- asking for rollouts -------------------------------------------------------------------------------------------

    def _want(self, visit: Visit, n: int) -> None:
        self._unsent[visit.uid] = None
        self._unsent_rollouts += n
        visit.ask(n)

    def _send(self, room: float) -> list[Request]:
        """Requests for what open groups want, in the order they wanted it."""
        sent: list[Request] = []
        left = min(room, self._rollouts_left())
        while self._unsent and left > 0:
            visit = self._open[next(iter(self._unsent))]
            request = visit.send(int(min(visit.unsent, left)))
            if not visit.unsent:
                del self._unsent[visit.uid]
            left -= request.n
            self._unsent_rollouts -= request.n
            self._in_flight += request.n
            self._statistics.rollouts_asked += request.n
            sent.append(request)
        return sent

    def _settle(self, room: int | None) -> list[Request]:
        """Nothing is in flight and nothing could be sent: judge what the limits starve, or say that it is over."""
        if self._unsent:
            for uid in list(self._unsent):
                self._close(self._open[uid])
            return self.requests(room)
        self._exhausted = len(self._shelf) < self._owed
        if not self.ready:
            raise Exhausted(self._why_exhausted())
        return []

    def _why_exhausted(self) -> str:
        statistics, limits = self._statistics, self.limits
        batches = statistics.num_gen_batches(self.gen_batch_size)
        if 0 < limits.max_num_gen_batches <= batches:
            return (
                f"num_gen_batches={batches} >= max_num_gen_batches={limits.max_num_gen_batches}. "
                "Generated too many batches. Please check if your data are too difficult."
            )
        return (
            f"{len(self._shelf)} of {self._owed} groups are kept and no more can be had: "
            f"{statistics.rollouts_asked} rollouts of max_rollouts_per_step={limits.max_rollouts_per_step}, "
            f"{statistics.tokens_arrived} tokens of max_tokens_per_step={limits.max_tokens_per_step}, "
            f"{self.prompts_issued} visits to {len(self.source)} prompts"
        )

    # -- judging -------------------------------------------------------------------------------------------------------

    def _decide(self, visit: Visit) -> None:
        """Ask for more, wait, or judge."""
        wanted = self.allocator.wanted(visit.view(), self.ledger)
        if wanted > visit.asked and visit.failures <= self.limits.max_retries:
            self._want(visit, wanted - visit.asked)
        elif len(visit.rollouts) >= wanted or not visit.waiting:
            self._close(visit)

    def _close(self, visit: Visit) -> None:
        self._stop(visit)
        group = visit.close()
        verdict = self.filter.judge(group) if len(group) else Verdict(False, "failed")
        informative = is_informative(group)
        positive = any(self.ledger.is_positive(rollout.reward) for rollout in group.rollouts)
        if len(group):
            self.ledger.record(group, informative=informative, step=self.step)
            self.selector.learn(group, informative=informative)
        self._statistics.judge(group, verdict, informative=informative, positive=positive, iterations=visit.asks)
        self._keep_rate.observe(verdict.keep)
        if verdict.keep:
            self._shelf.keep(group)
        else:
            self._shelf.drop(group, f"filtered/{verdict.reason}")

    def _stop(self, visit: Visit) -> None:
        """The group is open no longer; what is in flight is not needed."""
        del self._open[visit.uid]
        if visit.unsent:
            del self._unsent[visit.uid]
            self._unsent_rollouts -= visit.unsent
        if visit.in_flight:
            self._in_flight -= len(visit.in_flight)
            self._cancelled.append(visit.uid)

    def _observe_unexpected(self, event: Rollout | Failure, visit: Visit | None) -> None:
        """A group that is closed did not need it; one that is open has had it, or gave it up as failed."""
        if not _was_issued(event.uid, self.prompts_issued):
            raise ValueError(f"uid={event.uid!r} is unknown: no group of that name was ever requested")
        if visit is not None and not 0 <= event.index < visit.next_index:
            asked = f"0 to {visit.next_index - 1} were"
            raise ValueError(f"index={event.index} of group {event.uid} was never requested: {asked}")
        self._statistics.tokens_arrived += event.tokens
        self.accounts.post("cancelled" if visit is None else "duplicate", event.tokens)

    def _reject(self, uid: str, indices: Collection[int] | None, reason: str) -> bool:
        """Whether the group is lost."""
        group = self._shelf.find(uid)
        gone = {rollout.index for rollout in group.rollouts} if indices is None else set(indices)
        left = tuple(rollout for rollout in group.rollouts if rollout.index not in gone)
        trained = tuple(rollout for rollout in group.trained if rollout.index not in gone)
        rest = replace(group, rollouts=left, trained=trained)
        if left and self.filter.judge(rest).keep:
            self._shelf.shorten(group, rest, reason)
            return False
        self._statistics.rejected += 1
        self._keep_rate.take_back()
        self._owed += self._shelf.reject(group, reason)
        return True

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values and numpy arrays: a run cut here goes on exactly."""
        parts = {
            name.removeprefix("_"): getattr(self, name).state_dict() for name in (*_PARTS, "_shelf", "_statistics")
        }
        return {
            **parts,
            "step": self.step,
            "prompts_issued": self.prompts_issued,
            "owed": self._owed,
            "open": [pack_visit(visit) for visit in self._open.values()],
            "unsent": list(self._unsent),
            "cancelled": list(self._cancelled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where ``state_dict`` was written. Prompts are found by key: the data may be in another order."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name.removeprefix("_")])
        self._shelf.load_state_dict(state["shelf"], self._find_prompt)
        self._statistics = Statistics.from_state_dict(state["statistics"])
        self.step, self.prompts_issued = state["step"], state["prompts_issued"]
        self._owed = state["owed"]
        self._exhausted = False  # found out again, under the limits of today
        visits = [unpack_visit(packed, self._find_prompt(packed)) for packed in state["open"]]
        self._open = {visit.uid: visit for visit in visits}
        self._unsent = dict.fromkeys(state["unsent"])
        self._unsent_rollouts = sum(visit.unsent for visit in visits)
        self._in_flight = sum(len(visit.in_flight) for visit in visits)
        self._cancelled = list(state["cancelled"])
        self._pool.claim(self._queue.indices)
        self._pool.claim(visit.prompt.index for visit in visits)
        self._pool.claim(group.prompt.index for group in self._shelf.kept)

    def _find_prompt(self, packed: dict[str, Any]) -> Prompt:
        place = KeyedPositions(self.ledger.keys).find_one(packed["key"], packed["index"])
        if place < 0:
            raise ValueError(
                f"group {packed['uid']} of the saved state is about a prompt (key {packed['key']}) "
                f"that is not among the {len(self.source)} prompts of this data set"
            )
        return self.source[place]


_PARTS = ("ledger", "accounts", "selector", "allocator", "filter", "_pool", "_queue", "_keep_rate")


def _finite(rollout: Rollout) -> bool:
    return math.isfinite(rollout.reward) and all(map(math.isfinite, rollout.metrics.values()))


def _was_issued(uid: str, prompts_issued: int) -> bool:
    return uid[:1] == "g" and uid[1:].isdecimal() and issue_order(uid) < prompts_issued
