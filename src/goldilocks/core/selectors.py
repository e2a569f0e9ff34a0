"""Selectors: which prompts come next, and the queue of those that were chosen."""

from __future__ import annotations

import inspect
import math
import reprlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.core.allocators import Allocator, Fixed, Sequential
from goldilocks.core.beliefs import Beliefs
from goldilocks.core.filters import Policy, build
from goldilocks.core.source import KeyedPositions, PromptOrder
from goldilocks.errors import require
from goldilocks.types import Group

KWARGS = "goldilocks.selector_kwargs"
ENOUGH = 20  # explored groups that differed: the estimate of what uniform sampling needs is then a fifth off
HARD = 0.2  # the highest pass rate of a hard prompt


class Selector(Policy):
    """Chooses prompts, a generation batch at a time."""

    allocator: Allocator = Fixed()  # the collector sets its own: what a visit is worth depends on who ends it

    @abstractmethod
    def choose(self, pool: PromptOrder, beliefs: Beliefs, k: int, rng: np.random.Generator) -> np.ndarray:
        """Return at most ``k`` indices: from ``pool.next``, the shuffled pass, or from ``pool.free``, all not in hand.

        Fewer than ``k``, even none, means that there are no more for now.
        """

    def learn(self, group: Group, beliefs: Beliefs, *, informative: bool) -> None:
        """Learn from a group that was judged; ``informative``: its rewards differed."""


@dataclass
class Uniform(Selector):
    """The order of a shuffling data loader."""

    def choose(self, pool: PromptOrder, beliefs: Beliefs, k: int, rng: np.random.Generator) -> np.ndarray:
        return pool.next(k)


@dataclass
class Ranked(Selector):
    """Takes the prompts that ``rank`` puts first. A share ``explore`` of every choice is the next of the shuffled pass.

    So every belief is tested, and no prompt is left out for ever. No prompt is chosen while it is in hand. Of a very
    large data set only a fresh random ``window`` is ranked.

    The explored prompts are a uniform draw: ``metrics`` says by them what uniform sampling would need. Where one of
    their groups was given up, it counts as the chance, by what was believed of its prompt, that the rollouts it lacks
    would have made it informative.
    """

    explore: float = 0.1
    window: int = 262_144
    _informative: int = field(default=0, init=False)
    # By the key of the prompt, which finds it in data of another order: what was believed, until it is judged.
    _exploring: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)
    _explored: int = field(default=0, init=False)
    _differed: float = field(default=0.0, init=False)  # of the explored groups, those given up as chances

    def __post_init__(self) -> None:
        require(0 <= self.explore <= 1, f"{KWARGS}.explore", self.explore, "a share of uniform draws in [0, 1]")
        require(self.window >= 1, f"{KWARGS}.window", self.window, "1 or more prompts")

    @abstractmethod
    def rank(self, rows: np.ndarray, beliefs: Beliefs, k: int, rng: np.random.Generator) -> np.ndarray:
        """Return a number for each prompt; the smallest are taken first."""

    def choose(self, pool: PromptOrder, beliefs: Beliefs, k: int, rng: np.random.Generator) -> np.ndarray:
        free = pool.is_free()
        # Rounded up as often as the fraction says: a tenth of a choice of four is one prompt in two choices of five.
        explored = pool.next(int(self.explore * k + rng.random()))
        explored = np.unique(explored[free[explored]])  # where a pass ends, the next may begin with the same prompt
        free[explored] = False
        a, b = beliefs.posterior(explored)
        keys = beliefs.keys[explored].tolist()
        self._exploring.update(zip(keys, zip(a.tolist(), b.tolist(), strict=True), strict=True))
        rows, window = np.flatnonzero(free), max(self.window, k)
        if len(rows) > window:
            rows = np.sort(rng.choice(rows, window, replace=False, shuffle=False))
        return np.concatenate([explored, first_of(rows, self.rank(rows, beliefs, k, rng), k - len(explored))])

    def learn(self, group: Group, beliefs: Beliefs, *, informative: bool) -> None:
        self._informative += informative
        believed = self._exploring.pop(group.prompt.key, None)
        if believed is not None:
            same, other = believed if beliefs.passes(group) else believed[::-1]
            lacking = range(len(group), self.allocator.size()[1])
            agree = math.prod((same + j) / (same + other + j) for j in lacking)
            self._explored += 1
            self._differed += 1.0 if informative else 1 - agree

    def state_dict(self) -> dict[str, Any]:
        counts = {"informative": self._informative, "explored": self._explored, "differed": self._differed}
        return {"exploring": [(key, *believed) for key, believed in sorted(self._exploring.items())], **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exploring = {key: (a, b) for key, a, b in state["exploring"]}
        self._informative, self._explored = state["informative"], state["explored"]
        self._differed = state["differed"]

    def metrics(self) -> dict[str, float]:
        counts = {"informative_groups": self._informative, "explored_groups": self._explored}
        found: dict[str, float] = {f"selector/{name}": count for name, count in counts.items()}
        if isinstance(self.allocator, (Fixed, Sequential)) and self._differed >= ENOUGH:
            whole = self.allocator.size()[1]
            found["selector/uniform_rollouts"] = whole * self._informative * self._explored / self._differed
        return found


def first_of(rows: np.ndarray, ranks: np.ndarray, k: int) -> np.ndarray:
    """Return the ``k`` rows of the smallest ranks, the smallest first. Of equal ranks the smaller row comes first.

    Ranks are compared in single precision: the last bits of a double depend on the machine, and decisions must not.
    """
    ranks = ranks.astype(np.float32)
    if 0 < k < len(rows):
        near = np.flatnonzero(ranks <= np.partition(ranks, k - 1)[k - 1])
        rows, ranks = rows[near], ranks[near]
    return np.asarray(rows[np.argsort(ranks, kind="stable")][: max(k, 0)])


@dataclass
class Thompson(Ranked):
    """Thompson sampling on the distance to a pass rate of ``target``.

    Each prompt's pass rate is drawn from its posterior, and the prompts nearest the target are taken. Uncertain prompts
    draw widely and are tried now and then; prompts known to be always right or always wrong are not.
    """

    target: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.target < 1, f"{KWARGS}.target", self.target, "a pass rate in (0, 1)")

    def rank(self, rows: np.ndarray, beliefs: Beliefs, k: int, rng: np.random.Generator) -> np.ndarray:
        return np.abs(beliefs.draw(rows, rng) - np.float32(self.target))


@dataclass
class Frontier(Ranked):
    """The prompts of the largest expected worth for what they cost: the chance to be informative, per token.

    A prompt that was visited lately is worth less: two visits with nothing between them teach less than visits to two
    prompts. ``rest`` says by how much, each visit of the last epoch or so counts; 0: not at all. A share ``hard`` of
    every choice is kept for prompts believed to be passed at most one time in five, the likeliest to be informative
    first, whatever they cost.
    """

    rest: float = 0.5
    hard: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rest >= 0, f"{KWARGS}.rest", self.rest, "0 or more")
        require(0 <= self.hard <= 1, f"{KWARGS}.hard", self.hard, "a share of every choice in [0, 1]")

    def rank(self, rows: np.ndarray, beliefs: Beliefs, k: int, rng: np.random.Generator) -> np.ndarray:
        a, b = beliefs.posterior(rows)
        worth = self.allocator.worth(a, b) / (1 + self.rest * beliefs.recent[rows])
        ranks = -worth / beliefs.expected_cost(rows)
        kept = min(int(self.hard * k + rng.random()), k) if self.hard else 0
        if kept:
            hard = np.flatnonzero(a <= HARD * (a + b))
            first = first_of(hard, -worth[hard], kept)
            ranks[first] = ranks.min(initial=0.0) * (2 + worth[first])  # before all others
        return np.asarray(ranks)


@dataclass
class Greso(Selector):
    """The shuffled pass, without prompts whose last visits had no variance, after GRESO (arXiv 2506.02177).

    A prompt with a streak of s zero-variance visits is skipped with probability 1 − pˢ. The exploration rate p moves by
    a fixed ``step``: down while the share of zero-variance groups is above ``target``, up otherwise.
    """

    target: float = 0.25
    p: float = 0.5
    step: float = 0.01
    p_min: float = 0.05
    p_max: float = 0.95
    _judged: int = field(default=0, init=False)
    _without_variance: int = field(default=0, init=False)
    _skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        require(0 < self.target < 1, f"{KWARGS}.target", self.target, "a share of zero-variance groups in (0, 1)")
        ordered = 0 < self.p_min <= self.p <= self.p_max < 1
        require(ordered, f"{KWARGS}.p", self.p, "in (0, 1), between p_min and p_max")
        require(0 <= self.step < 1, f"{KWARGS}.step", self.step, "in [0, 1)")

    def choose(self, pool: PromptOrder, beliefs: Beliefs, k: int, rng: np.random.Generator) -> np.ndarray:
        if self._judged:
            direction = 1 if self._without_variance / self._judged <= self.target else -1
            self.p = min(max(self.p + direction * self.step, self.p_min), self.p_max)
            self._judged = self._without_variance = 0
        chosen: list[int] = []
        for _ in range(0, pool.size, k):  # at most one epoch is skipped through: a data set of streaks is still used
            rows = pool.next(k - len(chosen))
            go = rng.random(len(rows)) < self.p ** beliefs.streak[rows].astype(np.float64)
            chosen.extend(rows[go].tolist())
            self._skipped += int((~go).sum())
            if len(chosen) >= k or not len(rows):
                break
        return np.asarray(chosen if chosen else pool.next(k), dtype=np.int64)

    def learn(self, group: Group, beliefs: Beliefs, *, informative: bool) -> None:
        self._judged += 1
        self._without_variance += not informative

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("p", "_judged", "_without_variance", "_skipped")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def metrics(self) -> dict[str, float]:
        return {"selector/greso_p": self.p, "selector/greso_skipped": self._skipped}


SELECTORS: dict[str, type[Selector]] = {"uniform": Uniform, "greso": Greso, "thompson": Thompson, "frontier": Frontier}


def build_selector(name: str, params: Mapping[str, Any] | None = None) -> Selector:
    return build("selector", name, params or {}, SELECTORS, Selector)  # type: ignore[type-abstract]


class PromptQueue:
    """Hands out ``(index, n, again)``: a prompt that is not open, the rollouts to ask for, whether it was out before.

    The selector and the allocator are consulted once for each generation batch. A cancelled prompt returns to the head.
    """

    def __init__(
        self, order: PromptOrder, selector: Selector, allocator: Allocator, beliefs: Beliefs, *, batch: int, seed: int
    ) -> None:
        self._order = order
        self._selector = selector
        self._allocator = allocator
        self._beliefs = beliefs
        self._batch = batch
        self._rng = np.random.default_rng(seed)
        self._waiting: deque[tuple[int, int, bool]] = deque()

    def head(self) -> tuple[int, int, bool] | None:
        """Return the next prompt without removing it; None when there are no more."""
        if not self._waiting:
            self._choose()
        return self._waiting[0] if self._waiting else None

    @property
    def indices(self) -> list[int]:
        return [index for index, _, _ in self._waiting]

    @property
    def returned(self) -> int:
        """How many prompts were put back and are still to be visited again."""
        return sum(again for _, _, again in self._waiting)

    def pop(self) -> tuple[int, int, bool]:
        return self._waiting.popleft()

    def put_back(self, index: int, n: int) -> None:
        """Visit a prompt next, because its visit was cancelled."""
        self._waiting.appendleft((index, n, True))

    def _choose(self) -> None:
        choose, first, most = self._selector.choose, self._allocator.first, self._order.size - 1
        found = choose(self._order, self._beliefs, self._batch, self._rng)
        rows = np.asarray(found)
        whole = rows.ndim == 1 and (rows.dtype.kind in "iu" or not len(rows))
        for bad in rows[(rows < 0) | (rows > most)].tolist() if whole else [found]:
            accepted = f"accepted: places of prompts, whole numbers from 0 to {most}"
            raise ValueError(f"{place_of(choose)} returned {reprlib.repr(bad)}; {accepted}")
        sizes = first(rows, self._beliefs)
        if len(sizes) != len(rows) or any(n < 1 for n in sizes):
            said = f"{place_of(first)} returned {list(sizes)} for {len(rows)} prompts"
            raise ValueError(f"{said}; accepted: 1 or more for each")
        chosen = [int(row) for row in rows]
        self._order.claim(chosen)
        self._waiting.extend((index, n, False) for index, n in zip(chosen, sizes, strict=True))

    def state_dict(self) -> dict[str, Any]:
        keys = self._beliefs.keys
        waiting = [(index, n, again, int(keys[index])) for index, n, again in self._waiting]
        return {"rng": self._rng.bit_generator.state, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Prompts that are gone from the data are dropped."""
        self._rng.bit_generator.state = state["rng"]
        positions = KeyedPositions(self._beliefs.keys)
        found = ((positions.find_one(key, index), n, again) for index, n, again, key in state["waiting"])
        self._waiting = deque(one for one in found if one[0] >= 0)


def place_of(method: Callable[..., Any]) -> str:
    """Return a method's name with its file and line."""
    code = inspect.unwrap(method).__code__
    return f"{method.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
