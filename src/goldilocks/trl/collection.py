"""Collecting one batch: rounds of TRL's own generation until the collector has the groups it wants.

The first process decides. What it decides, a round to generate or a batch to train, is plain data that travels to the
others.

Invariant: when the batch is one round of whole groups, as with everything off, what is trained is what TRL made of it,
tensor for tensor. Otherwise rows of several rounds, and of earlier steps, are put together here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import trl
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from goldilocks.drive.backend import places
from goldilocks.drive.driver import Driver
from goldilocks.drive.rows import Place
from goldilocks.hashing import Sources, is_known
from goldilocks.rewards import spent
from goldilocks.trl.rows import LOG_PROBS, SAMPLED, CompletionRow, CompletionRows, DatasetPrompts, join_rows
from goldilocks.types import Event, Failure, Group, Request, Rollout, hashed

logger = logging.getLogger(__name__)

T = TypeVar("T")
WrittenFor = Sequence[tuple[Callable[..., Any], Sources]]  # functions of TRL, with the digests of each one's sources
SCALE = "goldilocks_loss_scale"  # a column of the batch: how much the rows that fill it up would thin the loss out


@dataclass(frozen=True)
class Sizes:
    """Of ``GRPOConfig``: rollouts per prompt, parts that a process cuts its batch into, and how TRL pads."""

    n: int
    parts: int
    pad_token: int
    multiple: int | None


@dataclass(frozen=True)
class Rewards:
    """How TRL makes one score and one advantage of several reward functions."""

    names: Sequence[str]
    score: Callable[[CompletionRow], float]
    advantages: Callable[[Sequence[Sequence[CompletionRow]]], list[Tensor]]  # of each row, by group


# Of this process's share of a round: inputs, the size of a group and seeds give what TRL made, and the rows in it.
Generate = Callable[[list[dict[str, Any]], int, list[int]], tuple[dict[str, Any], list[CompletionRow]]]
LogProbs = Callable[[list[CompletionRow]], list[Tensor]]


class Collection:
    """The driver at work in TRL. ``driver`` is there on the first process only, which leads; the others follow."""

    driver: Driver | None = None

    def __init__(
        self,
        prompts: DatasetPrompts,
        rows: CompletionRows,
        processes: Processes,
        sizes: Sizes,
        *,
        keeps: bool,
        seed: int,
    ) -> None:
        spent.clear()  # what an earlier run of this process has left
        self.rows, self._prompts = rows, prompts
        self._processes, self._sizes, self._keeps, self._seed = processes, sizes, keeps, seed
        self._together = False  # whether all processes are generating
        self.batch: Batch | None = None
        self.trained: dict[Place, float] = {}  # the advantage of each rollout of the batch
        self._update = -1  # how many updates had begun when the batch was taken
        self.generated: list[Place | None] = []  # for this batch, in TRL's order; None: so that processes have as many

    def collect(self, generate: Generate, log_probs: LogProbs, rewards: Rewards) -> dict[str, Any]:
        """Return what TRL trains on next, this process's part of it. An update may be of several batches."""
        self._generate, self._rewards, self._together = generate, rewards, False
        self._rounds: list[tuple[Round, dict[str, Any]]] = []
        self.generated = []
        if self.driver is None:
            while isinstance(decision := self._processes.receive(), Round):
                self._generate_round(decision)
            self.batch = decision
        else:
            self.batch = self._lead(self.driver)
        output = self._output(self.batch)
        self._rounds = []  # their tensors would take up memory in the update
        self.rows.retain(self.batch.alive)
        if self._keeps:
            self._remember_log_probs(self.batch, log_probs)
        return output

    def _lead(self, driver: Driver) -> Batch:
        """Fill a batch. The other processes are sent every round, then the batch, or what is raised on the way."""
        driver.collector.reissue()  # what a round that was cut short, as by Ctrl-C, has left in flight
        more, self._update = driver.meter.updates == self._update, driver.meter.updates
        try:
            driver.batch(more=more)
            batch = Batch.of(driver, more=more)
        except Exception as error:
            if not self._together:  # else each process raises its own
                self._processes.send(error)
            raise
        self._processes.send(batch)
        return batch

    # -- a round -------------------------------------------------------------------------------------------------------

    def events(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Have all processes generate a round; yield what became of each rollout. The driver calls this."""
        decided, rewards = Round(tuple(requests), self._seed), self._rewards
        self._processes.send(decided)
        for (request, number, _), row in zip(places(requests), self._generate_round(decided), strict=True):
            if not row.tokens:
                yield Failure(request.uid, number, "empty_response")
                continue
            # A function that returned None does not apply to this prompt: it has no value, and NaN is not equal to it.
            metrics = {name: value for name, value in zip(rewards.names, row.rewards, strict=True) if value == value}
            score, said = rewards.score(row), row.tool_tokens
            yield Rollout(request.uid, number, score, row.tokens, metrics, truncated=row.truncated, tool_tokens=said)

    def _generate_round(self, decided: Round) -> list[CompletionRow]:
        self._together = True
        requests = decided.requests
        indices = [request.prompt.index for request, _, _ in places(requests)]
        self.generated += [(request.uid, number) for request, number, _ in places(requests)]
        self.generated += [None] * (-len(indices) % self._processes.count)
        inputs = self._prompts.rows(self._processes.share(indices))
        size = self._sizes.n if self._whole(requests) else 1
        output, own = self._generate(inputs, size, self._processes.share(decided.seeds))
        rows = self.gathered(own)[: len(indices)]
        for (request, number, _), row in zip(places(requests), rows, strict=True):
            self.rows.put((request.uid, number), row)
        self._rounds.append((decided, output))
        self._together = False
        return rows

    def gathered(self, rows: list[CompletionRow]) -> list[CompletionRow]:
        """Return the rows of all processes; the first one takes over what the others' reward functions have cost."""
        parts = self._processes.gathered([(rows, spent.read())])
        if self._processes.first:
            for _, costs in parts:
                spent.add(**costs)
        return [row for part, _ in parts for row in part]

    def _whole(self, requests: Sequence[Request]) -> bool:
        """Whether every group is complete in this round, so that TRL's own view of groups holds."""
        n, count = self._sizes.n, self._processes.count
        return all(request.first == 0 and request.n == n for request in requests) and len(requests) * n % count == 0

    # -- the batch -----------------------------------------------------------------------------------------------------

    def _output(self, batch: Batch) -> dict[str, Any]:
        """Return what TRL made of the round that the batch is, else columns of its rows; note all advantages."""
        trained = [(rollout.uid, rollout.index) for group in batch.groups for rollout in group.trained]
        everything = [(rollout.uid, rollout.index) for group in batch.groups for rollout in group.rollouts]
        made = None
        if len(self._rounds) == 1 and not batch.silent:
            decided, output = self._rounds[0]
            asked = [(request.uid, number) for request, number, _ in places(decided.requests)]
            fits = len(asked) % (self._processes.count * self._sizes.parts) == 0
            # The batch is this round: the same rollouts in the same order, all of them trained.
            if self._whole(decided.requests) and asked == trained == everything and fits:
                made = output
        if made is not None and self._processes.count == 1:  # this process generated all of it
            self.trained = dict(zip(trained, made["advantages"].tolist(), strict=True))
            return made
        self.trained = self._advantages(batch, self._rewards)
        return made or self._joined(batch.silent)

    def _advantages(self, batch: Batch, rewards: Rewards) -> dict[Place, float]:
        """Return the advantage of every rollout that is trained; baselines are over all rollouts of a group."""
        groups = [[(rollout.uid, rollout.index) for rollout in group.rollouts] for group in batch.groups]
        found = rewards.advantages([self.rows.get(group) for group in groups])
        values = [value for own in found for value in own.tolist()]
        of = dict(zip((place for group in groups for place in group), values, strict=True))
        return {(one.uid, one.index): of[one.uid, one.index] for group in batch.groups for one in group.trained}

    def _joined(self, without: Set[str]) -> dict[str, Any]:
        """Return the columns of the rows with an advantage; those of groups ``without`` only keep the batch's shape."""
        own = [(place[0] in without, self.rows[place]) for place in self.trained]
        rows = [row.silent() if spare else row for spare, row in own]
        if any(LOG_PROBS in row.tensors for row in rows):
            rows = [row if LOG_PROBS in row.tensors else row.with_own_log_probs() for row in rows]
        tokens = torch.stack([row.loss_mask.sum() for row in rows]).sum()
        silent = -len(rows) % (self._processes.count * self._sizes.parts)
        filled = [*rows, *[rows[-1].silent()] * silent]
        scale = len(filled) / len(rows)
        mine = slice(self._processes.rank, None, self._processes.count)  # spreads what fills the batch up
        advantages = torch.tensor([*self.trained.values(), *[0.0] * silent])[mine]
        columns = join_rows(filled[mine], self._sizes.pad_token, self._sizes.multiple)
        return {**columns, "advantages": advantages, "num_items_in_batch": tokens, SCALE: torch.tensor(scale)}

    # -- log-probs of the policy that wrote a rollout ------------------------------------------------------------------

    def _remember_log_probs(self, batch: Batch, log_probs: LogProbs) -> None:
        """Rollouts that wait for a later batch are trained against this policy's log-probs, so they are taken now.

        The engine returned them with the rollout; TRL's ``generate`` did not, so they are computed.
        """
        lacking = {place: row for place in batch.waiting if LOG_PROBS not in (row := self.rows[place]).tensors}
        known = {place: row.tensors[SAMPLED] for place, row in lacking.items() if SAMPLED in row.tensors}
        if rest := [place for place in lacking if place not in known]:
            mine = self._processes.share([lacking[place] for place in rest])
            known.update(zip(rest, self._processes.gathered(log_probs(mine)), strict=False))
        for place, values in known.items():
            self.rows.put(place, lacking[place].with_log_probs(values))


@dataclass(frozen=True)
class Round:
    """Requests that are generated together; ``seed`` is the run's."""

    requests: tuple[Request, ...]
    seed: int

    @property
    def seeds(self) -> list[int]:
        """The seed of every rollout: a function of the run's seed, the prompt, the visit and the rollout's number."""
        prompts = ((request.prompt.key, request.prompt.index, request.visit) for request in self.requests)
        visits = [hashed(self.seed, *prompt) for prompt in prompts]
        return [hashed(visits[place], number) for _, number, place in places(self.requests)]


@dataclass(frozen=True)
class Batch:
    """The groups to train; ``waiting`` are the rollouts that a later batch may need, ``alive`` their groups.

    Groups that are ``silent`` fill the batch up and are not trained. ``more``: it is not the first of its update, and
    ``metrics`` are those of all batches of the update so far.
    """

    groups: tuple[Group, ...]
    silent: frozenset[str]
    alive: frozenset[str]
    waiting: tuple[Place, ...]
    metrics: dict[str, float]
    more: bool

    @classmethod
    def of(cls, driver: Driver, *, more: bool = False) -> Batch:
        """Return the batch in hand."""
        collector, backfilled = driver.collector, driver.collector.backfilled
        waiting = tuple((rollout.uid, rollout.index) for rollout in collector.waiting_rollouts)
        silent = frozenset(backfilled if len(backfilled) < len(collector.in_hand) else ())
        return cls(collector.in_hand, silent, frozenset(collector.alive), waiting, driver.metrics(), more)


def warn_of_changes(written_for: WrittenFor, versions: str) -> None:
    """Name functions of TRL that are not those of the tested versions: results may differ from what the tests saw."""
    if changed := [function.__qualname__ for function, sources in written_for if not is_known(function, sources)]:
        message = "TRL %s has another %s than TRL %s: Goldilocks was not tested with it"
        logger.warning(message, trl.__version__, ", ".join(changed), versions)


@contextmanager
def having(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object of TRL's within the block."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Processes:
    """What accelerate knows of them."""

    def __init__(self, accelerator: Any) -> None:
        self.count: int = accelerator.num_processes
        self.rank: int = accelerator.process_index
        self.first = self.rank == 0

    def decided(self, decide: Callable[[], T]) -> T:
        """Return on every process what ``decide`` returns on the first; raise on every process what it raises there."""
        if not self.first:
            value: T = self.receive()
            return value
        try:
            decided = decide()
        except Exception as error:
            self.send(error)
            raise
        self.send(decided)
        return decided

    def send(self, value: Any) -> None:
        """Send a value, or an error, from the first process to the others, which ``receive`` it."""
        if self.count > 1:
            broadcast_object_list([(None, value) if isinstance(value, Exception) else (value, None)])

    def receive(self) -> Any:
        """Return what the first process sends; raise an error that it sends."""
        box: list[Any] = [None]
        broadcast_object_list(box)
        value, error = box[0]
        if error is not None:
            raise error
        return value

    def gathered(self, items: Sequence[T]) -> list[T]:
        """Return the items of every process, those of the first process first."""
        return list(items) if self.count == 1 else list(gather_object(list(items)))

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's part of the items, of which the last is repeated until every process has as many.

        ``gathered`` puts the parts together again.
        """
        even = [*items, *[items[-1]] * (-len(items) % self.count)]
        size = len(even) // self.count
        return even[self.rank * size : (self.rank + 1) * size]
