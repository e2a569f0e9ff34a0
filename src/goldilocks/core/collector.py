"""The state machine over groups: ``open → (more rollouts)* → kept | dropped(reason)``.

    while not collector.ready:
        for request in collector.requests(room=engine.free):
            engine.submit(request)
        for event in engine.step():
            collector.observe(event)
        for uid in collector.cancelled():
            engine.abort(uid)
    batch = collector.take()  # with ``on_full: partial``, ``observe`` then takes each rollout that pauses

A step ends with ``take``, and the next ``requests`` begins the next one. Only calls change anything:

| call         | while a batch is being collected      | while a batch is in hand                                    |
|--------------|---------------------------------------|-------------------------------------------------------------|
| ``requests`` | asks for what is missing              | begins the next step, then asks for what is missing         |
| ``take``     | hands the batch out, if ``ready``     | ``ValueError``: it was taken already                        |
| ``reject``   | drops kept groups                     | drops groups of the batch; missing ones are collected again |
| ``trim``     | leaves rollouts of taken groups out   | leaves rollouts of the batch untrained                      |
| ``extend``   | changes nothing                       | asks for another batch of the same update                   |
| ``put_back`` | puts back batches taken before        | all batches of the update wait again, and the step goes on  |

Decisions are made when a rollout arrives, never by scanning all prompts or all groups. Invariants:

- a batch has exactly the groups that were asked for, whole, in the order their prompts were issued;
- the order in which a group's rollouts arrive changes neither the group nor what is asked for it;
- no limit is ever exceeded;
- every rollout that arrived is in exactly one account;
- the decisions are a function of the seed and of what was observed, across any number of saves and loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from goldilocks.core.accounts import Accounts, FiniteMetrics, PausedRollouts, StepStatistics
from goldilocks.core.allocators import Allocator
from goldilocks.core.beliefs import Beliefs
from goldilocks.core.filters import Filter
from goldilocks.core.groups import JudgedGroups, OpenGroup, OpenGroups, group_name, was_opened
from goldilocks.core.limits import Exhausted, KeepRate, Limits, Surplus
from goldilocks.core.selectors import PromptQueue, Ranked, Selector
from goldilocks.core.source import IssuedVisits, KeyedPositions, PromptOrder, Source, find_prompt
from goldilocks.errors import refuse, require
from goldilocks.sheet import Sheet
from goldilocks.types import (
    MIN_STD,
    Account,
    Event,
    Failure,
    Group,
    OnExhausted,
    OnFull,
    Paused,
    Request,
    Rollout,
    Verdict,
    mean_and_std,
)

STATE_LAYOUT = 9  # raised when ``state_dict`` changes its meaning

# The attributes that are saved, but for the statistics: each has ``state_dict`` and ``load_state_dict``.
_POLICIES = ("selector", "allocator", "filter")
_PARTS = ("beliefs", "accounts", *_POLICIES, "_order", "_queue", "_keep_rate", "_issued", "_paused")
_WITH_GROUPS = ("_judged", "_open")  # loading these finds prompts


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
        beliefs: Beliefs | None = None,
        ahead: int = 0,
        repeat: bool = True,
        order: Callable[[int], np.ndarray] | None = None,
        seed: int = 1,
        components: Sequence[str] = (),
    ) -> None:
        """``gen_batch_size`` prompts are chosen at a time (default: ``target_groups``), and no more are open at once.

        A group that an allocator may give up early counts by the rollouts that were asked for. ``ahead``: prompts are
        issued until this many groups are kept beyond the batch, so that an engine is busy to the end of it.
        ``repeat=False``: no prompt is visited twice. ``order`` returns each epoch's pass, where the caller shuffles.
        ``components``: metrics that rewards are made of; a rollout may lack one. The mean of each is logged.
        """
        size = len(source)
        require(size > 0, "source", f"{size} prompts", "a data set with at least one prompt")
        require(target_groups >= 1, "target_groups", target_groups, "1 or more")
        fits = target_groups <= size or (repeat and not isinstance(selector, Ranked))  # which chooses none in hand
        require(fits, "target_groups (data.train_batch_size)", target_groups, f"at most {size}: none is in it twice")
        require(gen_batch_size is None or gen_batch_size >= 1, "gen_batch_size", gen_batch_size, "1 or more")
        self.source = source
        self.selector = selector
        self.allocator = selector.allocator = allocator
        self.filter = filter
        self.target_groups = target_groups
        self.gen_batch_size = gen_batch_size or target_groups
        self.limits = limits or Limits()
        self.surplus = surplus or Surplus()
        self.ahead = ahead
        self.beliefs = beliefs or Beliefs(source.keys())
        self.accounts = Accounts()
        self.step = 0
        self.prompts_issued = 0  # visits to prompts; one that is put back and visited again counts once
        self.last_prompt = math.inf  # the number of the last, where epochs end the run
        self.failures_in_a_row = 0
        self.flat_in_a_row = 0  # groups judged since one was kept
        self.last_failure: Failure | None = None

        spares = target_groups if self.limits.on_exhausted is OnExhausted.BACKFILL else 0
        self._order = PromptOrder(size, seed=seed, repeat=repeat, order=order, keys=self.beliefs.keys)
        self._queue = PromptQueue(self._order, selector, allocator, self.beliefs, batch=self.gen_batch_size, seed=seed)
        self._judged = JudgedGroups(
            self.accounts, self._order, lambda group: allocator.trained(group, self.beliefs), spares=spares
        )
        self._keep_rate = KeepRate(min(1.0, target_groups / self.gen_batch_size))
        self._components = components
        self._statistics = StepStatistics(components={name: [0.0, 0] for name in components})
        self._owed = target_groups  # groups this step has yet to hand out; 0 while its batch is being trained
        self.batches = 1  # of this step, as ``extend`` counts them
        self._exhausted = False
        self._opened = 0  # groups, also those whose prompts were out before
        self._finite = FiniteMetrics(filter.reads(), self.beliefs.metric)
        self._open = OpenGroups(whole=allocator.size()[1])
        self._issued = IssuedVisits(self.beliefs.keys)
        self._paused = PausedRollouts(self.accounts)

    # -- what to do ----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether ``take`` has a batch to hand out."""
        cut_short = self._exhausted and self.limits.on_exhausted is not OnExhausted.ERROR
        full = len(self._judged) >= self._owed
        # Where rollouts pause, an open group that would be too old after the update is waited for. So is every group
        # that is open when no prompt is left to issue: the batch may be the last.
        too_old = full and self.surplus.pauses and self._open.oldest < self.surplus.oldest(self.step + 1)
        waits = too_old or (len(self._open) > 0 and self.prompts_issued >= self.last_prompt)
        return self._owed > 0 and (cut_short or (full and not waits))

    def requests(self, room: int | None = None) -> list[Request]:
        """Return what to generate now, at most ``room`` rollouts (None: no bound). After ``take``, begin the next step.

        Raises ``Exhausted`` when nothing is left to wait for and the batch cannot be filled.
        """
        if not self._owed:
            self._begin_step()
        left = math.inf if room is None else room
        sent = self._open.send_again(left)  # charged to the step that asked for it first
        left -= sum(request.n for request in sent)
        # After the last prompt what is open is waited for. If that does not fill the batch, prompts come once more.
        past_the_end = not len(self._open) and self.prompts_issued >= self.last_prompt
        going_on = left > 0
        while going_on:
            more = self._open.send(min(left, self._rollouts_left))
            asked = sum(request.n for request in more)
            self._statistics.rollouts_asked += asked
            left -= asked
            sent += more
            going_on = left > 0 and self._shortfall() > 0 and self._open_next(past_the_end)
        if sent or self._open.in_flight or left <= 0:
            return sent
        if starved := self._open.waiting:  # the limits leave nothing for them: they are judged with what they have
            for open_group in starved:
                self._judge(open_group)
            return self.requests(room)
        self._exhausted = len(self._judged) < self._owed
        if not self.ready:
            raise self._exhaustion()
        return []

    def cancelled(self) -> list[str]:
        """Return the groups whose rollouts in flight are no longer needed, since this was last asked."""
        return self._open.cancelled()

    def take(self) -> tuple[Group, ...]:
        """Hand the batch out: the groups owed, in the order their prompts were issued, not in which they finished."""
        if not self._owed:
            raise ValueError("take: the batch is in hand already; requests begins the next step")
        if not self.ready:
            raise ValueError(f"take: the batch is not ready, {len(self._judged)} of {self._owed} groups are there")
        groups = self._judged.take(self._owed)
        backfilled = self._judged.backfill(self._owed - len(groups))
        self._statistics.backfilled += len(backfilled)
        if not (groups or backfilled or self._judged.in_hand):
            raise self._exhaustion()
        self._owed = 0
        self._requeue_open()
        return (*groups, *backfilled)

    # -- what happened -------------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Take in a rollout that arrived, failed or paused. Late and duplicate events are only counted."""
        if isinstance(event, Rollout):
            self.accounts.tool_tokens += event.tool_tokens
        open_group = self._open.get(event.uid)
        if open_group is None or event.index not in open_group.in_flight:
            self._observe_unexpected(event, open_group)
            return
        self._statistics.arrive(event, before=self._paused.end(event))
        if isinstance(event, Paused):
            self._paused.begin(event)
            return
        if isinstance(event, Rollout):
            event = self._finite.checked(event)
        if isinstance(event, Rollout):
            self.failures_in_a_row = 0
            self.accounts.post(Account.OPEN, event.tokens)
        else:
            failures = self._statistics.failures
            failures[event.reason] = failures.get(event.reason, 0) + 1
            self.failures_in_a_row, self.last_failure = self.failures_in_a_row + 1, event
            self.accounts.post(Account.FAILED, event.tokens)
        self._open.arrive(open_group, event)
        while (failed := open_group.advance()) is not None:
            if failed > self.limits.max_retries:
                open_group.lost += 1
            else:
                self._open.want(open_group, 1, failed)
        if not open_group.pending:
            self._decide(open_group)

    def reject(
        self, uids: Iterable[str] | Mapping[str, Collection[int]], reason: str, *, flat: bool = False
    ) -> tuple[str, ...]:
        """Take back groups of the batch in hand, or kept ones: whole, or the rollouts named for each.

        The rest of a group is judged again. Groups that no longer pass, or have no trained rollout left, are returned:
        they are not to be trained, and ``take`` hands out as many in their place once ``ready``. Groups rejected
        because they are ``flat``, without a gradient, may fill up a batch (``on_exhausted: backfill``); others never.
        """
        rows, judge = dict(uids) if isinstance(uids, Mapping) else dict.fromkeys(uids), self.filter.judge
        taken = len(self._judged.in_hand)
        lost = [uid for uid, indices in rows.items() if self._judged.reject(uid, indices, reason, judge, flat=flat)]
        self._owed += taken - len(self._judged.in_hand)
        self._statistics.rejected += len(lost)
        self._keep_rate.take_back(len(lost))
        return tuple(lost)

    def trim(self, rows: Mapping[str, Collection[int]]) -> None:
        """Do not train these rollouts of groups in hand, by group; their baselines still count them."""
        for uid, indices in rows.items():
            self._judged.trim(uid, indices)

    def extend(self) -> None:
        """Ask for another batch of the same update: the step goes on, and each batch has the limits of a step."""
        if not self._owed:
            self._judged.extend()
            self._owed, self.batches, self._exhausted = self.target_groups, self.batches + 1, False

    def put_back(self) -> None:
        """Let all batches of the update wait again, because they were not trained."""
        self._judged.put_back()
        self._owed, self.batches = self.target_groups, 1

    def reissue(self, known: Collection[tuple[str, int]] = ()) -> None:
        """Ask again for everything in flight, because the engine was restarted. No limit is charged again.

        ``known``: the paused rollouts (uid, index) that continue their text. The others begin anew.
        """
        self._open.lose()
        self._paused.retain([name for name in known if name[0] in self._open])

    # -- what there is to see ------------------------------------------------------------------------------------------

    @property
    def kept(self) -> tuple[Group, ...]:
        """Groups that wait to be taken, in the order their prompts were issued."""
        return self._judged.kept

    @property
    def owed(self) -> int:
        """How many groups the current step has yet to hand out."""
        return self._owed

    @property
    def in_hand(self) -> tuple[Group, ...]:
        """The batch in hand: the groups that ``take`` handed out and ``reject`` left."""
        return self._judged.in_hand

    @property
    def trained(self) -> list[Group]:
        """The groups that the update trains, of all its batches, without those that only fill them up."""
        return self._judged.trained

    @property
    def backfilled(self) -> set[str]:
        """The groups of the batch in hand that only fill it up, and are not to be judged again."""
        return self._judged.backfilled

    @property
    def waiting_rollouts(self) -> list[Rollout]:
        """Every rollout whose payload a later batch may need: of open, kept and spare groups."""
        judged = (*self._judged.kept, *(self._judged.spare if self._owed else ()))
        return [*chain(*(one.arrived for one in self._open), *(group.rollouts for group in judged))]

    @property
    def alive(self) -> set[str]:
        """The groups whose payloads are needed: open, kept, held to fill up, or in hand."""
        return {*(one.uid for one in self._open), *self._judged.uids}

    @property
    def in_flight(self) -> int:
        """How many rollouts are at the engine; those that it lost and was not asked for again do not count."""
        return self._open.in_flight - self._open.lost

    @property
    def begun(self) -> int:
        """How many prompts were issued and are not judged yet: open, or back in the queue."""
        return len(self._open) + self._queue.returned

    @property
    def keep_rate(self) -> float:
        """The share of groups that the filter is expected to keep."""
        return self._keep_rate.value

    @property
    def paused(self) -> dict[tuple[str, int], int]:
        """The rollouts that wait to go on, by group and index, with the tokens they have written."""
        return self._paused.tokens

    def metrics(self) -> dict[str, float]:
        """Return the current step's metrics and the running accounts."""
        parts = (self.accounts, self.beliefs, self.selector, self.allocator, self.filter)
        return {
            **self._statistics.metrics(self.gen_batch_size),
            "train/keep_rate": self._keep_rate.value,
            "train/groups_carried": len(self._judged),
            "train/groups_open": len(self._open),
            "train/rollouts_paused": len(self._paused),
            **self._statistics.batch_metrics(self.trained, self.step),
            "data/epoch": self.prompts_issued / len(self.source),
            "data/prompts_issued": self.prompts_issued,
            **{name: value for part in parts for name, value in part.metrics().items()},
        }

    def __repr__(self) -> str:
        groups = f"{len(self._judged):,} groups kept, {len(self._open):,} open"
        return f"Collector(step {self.step:,}, {groups}, {self.in_flight:,} rollouts in flight)"

    def _repr_html_(self) -> str:
        here = {"step": self.step, "groups of a batch": self.target_groups, "kept": len(self._judged)}
        here |= {"open": len(self._open), "rollouts in flight": self.in_flight, "prompts issued": self.prompts_issued}
        return Sheet(list(here), [[f"{value:,}" for value in here.values()]]).in_html() + self.accounts._repr_html_()

    # -- a step --------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self.beliefs.trained(self.trained)
        self._paused.retain([name for name in self._paused.tokens if name[0] in self._open])
        self.step += 1
        self._owed, self.batches, self._exhausted = self.target_groups, 1, False
        self._keep_rate.forget()
        self._statistics = StepStatistics(components={name: [0.0, 0] for name in self._components})
        self._statistics.expired = self._judged.begin_step(self.surplus.oldest(self.step))

    def _requeue_open(self) -> None:
        """Return prompts of open groups that may not finish, or would then be too old, to the queue's head."""
        requeue = self.surplus.on_full is OnFull.REQUEUE
        stopped = [one for one in self._open if requeue or one.version < self.surplus.oldest(self.step + 1)]
        for open_group in reversed(stopped):  # so that the first to be opened is the first in the queue
            self._open.close(open_group)
            self._statistics.cancelled |= {f"{open_group.uid}/{index}": 0 for index in open_group.in_flight}
            if open_group.rollouts:
                self.beliefs.end(open_group.finished(), open_group.learnt)
            self.accounts.move(open_group.arrived, Account.OPEN, Account.CANCELLED)
            self._queue.put_back(open_group.prompt.index, open_group.planned)

    # -- opening groups ------------------------------------------------------------------------------------------------

    def _shortfall(self) -> float:
        """How many more prompts to issue: the missing groups over the keep rate, within the limits."""
        missing = self._owed + self.ahead - len(self._judged)
        if missing <= 0 or self._exhausted:
            return 0
        needed = self.surplus.prompts_for(missing, self._keep_rate) - len(self._open)
        room = math.ceil(self.gen_batch_size - self._open.size)
        allowed = self.gen_batch_size * self.batches
        return min(needed, room, self.limits.prompts_left(self._statistics.prompts_issued, allowed))

    @property
    def _rollouts_left(self) -> float:
        step, writing = self._statistics, self._open.in_flight + len(self._statistics.cancelled)
        return self.limits.rollouts_left(step.rollouts_asked, step.tokens_arrived, writing, self.batches)

    def _open_next(self, past_the_end: bool) -> bool:
        """Open a group for the next prompt; False when there is none, or no budget for its first ask."""
        if (head := self._queue.head()) is None:
            return False
        index, n, again = head
        over = self.prompts_issued >= self.last_prompt and not (again or past_the_end)
        if over or n > self._rollouts_left - self._open.unsent:
            return False
        self._queue.pop()
        uid, visit = group_name(self._opened), self._issued.number(index)
        self._open.open(OpenGroup(uid, self.source[index], planned=n, version=self.step, visit=visit))
        self._opened += 1
        self.prompts_issued += not again
        self._statistics.prompts_issued += 1
        return True

    def _exhaustion(self) -> Exhausted:
        kept = f"{len(self._judged)} of {self._owed} groups are kept"
        visits = f"{self.prompts_issued} visits to {len(self.source)} prompts"
        return Exhausted.after(self.limits, self._statistics, self.gen_batch_size * self.batches, kept, visits)

    # -- judging -------------------------------------------------------------------------------------------------------

    def _decide(self, open_group: OpenGroup) -> None:
        """Ask for more, or judge. Called when everything that was asked for has arrived or failed."""
        have, view = len(open_group.rollouts), open_group.view()
        self.beliefs.learn(view, open_group.learnt)
        open_group.learnt = have
        works = have >= max(open_group.lost, 1)  # else its rollouts would fail on, up to the most that it can have
        wanted = self.allocator.wanted(view, self.beliefs) if works else 0
        most = wanted if self.allocator.most is None else self.allocator.most
        if (more := min(wanted, most - open_group.lost) - have) > 0:
            self._open.want(open_group, more)
        else:
            self._judge(open_group)

    def _judge(self, open_group: OpenGroup) -> None:
        self._open.close(open_group)
        group = open_group.finished()
        self.accounts.move(open_group.arrived[len(group) :], Account.OPEN, Account.CANCELLED)  # behind a gap
        verdict, passes, spread = Verdict(False, "failed"), self.beliefs.passes(group), 0.0
        if len(group):
            verdict, spread = self.filter.judge(group), mean_and_std(group.rewards)[1]
            self.beliefs.record(group, open_group.learnt)
            self.selector.learn(group, self.beliefs, informative=spread > MIN_STD)
            self.allocator.learn(group, self.beliefs)
        self._statistics.judge(group, verdict, spread=spread, passes=passes, iterations=open_group.asks)
        self._keep_rate.observe(verdict.keep)
        self.flat_in_a_row = 0 if verdict.keep else self.flat_in_a_row + 1
        if verdict.keep:
            self._judged.keep(group)
        else:
            self._judged.drop(group, Account.FILTERED.because(verdict.reason))

    def _observe_unexpected(self, event: Event, open_group: OpenGroup | None) -> None:
        """Count a late or duplicate event; ignore a late pause. An older step has reserved for its own late ones."""
        require(was_opened(event.uid, self._opened), "uid", event.uid, "a group that was requested")
        if open_group is not None and not 0 <= event.index < open_group.asked:
            refuse("index", event.index, f"0 to {open_group.asked - 1}, which were requested of group {event.uid}")
        if isinstance(event, Paused):
            return
        before = self._paused.end(event)
        if open_group or not self._owed or f"{event.uid}/{event.index}" in self._statistics.cancelled:
            self._statistics.arrive(event, before)
        self.accounts.post(Account.CANCELLED if open_group is None else Account.DUPLICATE, event.tokens)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as JSON values and numpy arrays: a run cut here goes on exactly."""
        return {
            "layout": STATE_LAYOUT,
            "step": self.step,
            "prompts_issued": self.prompts_issued,
            "opened": self._opened,
            "owed": self._owed,
            "policies": {part: type(getattr(self, part)).__name__ for part in _POLICIES},
            **{part.lstrip("_"): getattr(self, part).state_dict() for part in (*_PARTS, *_WITH_GROUPS, "_statistics")},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was written. Prompts are found by key: the data may be in another order."""
        found = state.get("layout")
        require(found == STATE_LAYOUT, "layout", found, f"a state saved in layout {STATE_LAYOUT}; start the run anew")
        for part in _PARTS:  # a policy that takes the place of another begins afresh
            if part not in _POLICIES or state["policies"][part] == type(getattr(self, part)).__name__:
                getattr(self, part).load_state_dict(state[part.lstrip("_")])
        find = partial(find_prompt, self.source, KeyedPositions(self.beliefs.keys))
        for part in _WITH_GROUPS:
            getattr(self, part).load_state_dict(state[part.lstrip("_")], find)
        self._statistics = StepStatistics.from_state_dict(state["statistics"])
        self.step, self.prompts_issued = state["step"], state["prompts_issued"]
        self._opened, self._owed, self.batches = state["opened"], state["owed"], 1
        self._exhausted = False  # decided again, under today's limits
        groups = (*self._open, *self._judged.kept, *self._judged.trained)
        self._order.claim([*self._queue.indices, *(one.prompt.index for one in groups)])
