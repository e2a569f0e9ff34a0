"""``goldilocks.rewards``: how reward functions are called, and several of them as one reward.

Invariant: every call that is begun is counted in ``spent``, whatever becomes of it. A function that waits for its next
try holds no place among those that run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from goldilocks.errors import refuse_unknown, require, require_type
from goldilocks.rewards.limited import AT_ONCE, TIMEOUT_S, Function, LimitedReward, Room
from goldilocks.types import Word

logger = logging.getLogger(__name__)

SECTION = "goldilocks.rewards"
SCORE = "score"  # the reward, in a function's result that has more
TAKEN = (SCORE, "reward")  # names that mean the sum


class OnFailure(Word):
    """What becomes of an answer whose reward function has failed for the last time."""

    FAIL = "fail"  # its rollout fails, and is asked for again (goldilocks.max_retries)
    ZERO = "zero"  # the function's score is 0
    ERROR = "error"  # the run ends


class RewardFailed(RuntimeError):
    """A reward function has failed for the last time, and ``on_failure=error`` ends the run."""


@dataclass(frozen=True)
class WeightedReward:
    """One of ``goldilocks.rewards.functions``."""

    path: str | None = None  # None: the function that the run has without this section
    name: str = "compute_score"
    weight: float = 1.0
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, given: Mapping[str, Any] | None) -> WeightedReward:
        """Return the function of this name in the config, checked."""
        key, hints = f"{SECTION}.functions.{name}", get_type_hints(cls)
        require(name not in TAKEN, f"{SECTION}.functions", name, f"another name: {name} is the weighted sum of all")
        require_type(key, given or {}, Mapping[str, Any])
        refuse_unknown(key, given or {}, hints)
        for part, value in (given or {}).items():
            require_type(f"{key}.{part}", value, hints[part])
        read = cls(**(given or {}))
        require(math.isfinite(read.weight), f"{key}.weight", read.weight, "a finite number")
        return read


@dataclass(frozen=True)
class RewardCalls:
    """``goldilocks.rewards``. With every default, functions are called as without the section."""

    functions: Mapping[str, Any] | None = None
    concurrency: int | None = None
    timeout: float | None = None
    retries: int = 0
    backoff: float = 1.0
    on_failure: str = str(OnFailure.FAIL)

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(RewardCalls).items():
            require_type(f"{SECTION}.{name}", getattr(self, name), hint)
        OnFailure.parse(f"{SECTION}.on_failure", self.on_failure)
        for name, least in (("concurrency", 1), ("retries", 0), ("backoff", 0.0)):
            value = getattr(self, name)
            require(value is None or value >= least, f"{SECTION}.{name}", value, f"{least:g} or more")
        require(self.timeout is None or self.timeout > 0, f"{SECTION}.timeout", self.timeout, "above 0, or null")
        _ = self.weighted

    @property
    def weighted(self) -> dict[str, WeightedReward]:
        """The functions by name, checked; none where the run has one function and no weights."""
        return {name: WeightedReward.read(name, given) for name, given in (self.functions or {}).items()}

    @property
    def in_use(self) -> bool:
        """Whether any key of the section is set."""
        return self != RewardCalls()


class RewardCosts:
    """What the reward functions of this process have cost since it was last read."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def read(self) -> dict[str, float]:
        """Return the counts; the next reading begins at none."""
        counts, self._counts = self._counts, {}
        return counts


spent = RewardCosts()


class Part(NamedTuple):
    """A function and what its score is multiplied by."""

    function: LimitedReward
    weight: float = 1.0


class RewardCaller:
    """Calls the functions of one reward; awaited with an answer's arguments."""

    def __init__(self, parts: Mapping[str, Part], calls: RewardCalls, timeout_s: float = TIMEOUT_S) -> None:
        """``parts`` by name; where the config names none, one part whose result is the reward."""
        self._parts, self._calls = parts, calls
        self._timeout_s = calls.timeout or timeout_s
        self._room = Room(calls.concurrency or AT_ONCE)
        self._last: dict[str, Any] = {}  # the last result of each function, whose form a failed one takes

    async def __call__(self, **arguments: Any) -> Any:
        if not self._calls.functions:
            (name,) = self._parts
            return await self._result(name, arguments)
        results = await asyncio.gather(*(self._result(name, arguments) for name in self._parts), return_exceptions=True)
        for result in results:  # raised when all have ended, so that what they cost is counted
            if isinstance(result, BaseException):
                raise result
        return self._sum(dict(zip(self._parts, results, strict=True)))

    async def _result(self, name: str, arguments: dict[str, Any]) -> Any:
        for attempt in range(self._calls.retries + 1):
            if attempt:
                spent.add(retries=1)
                await asyncio.sleep(self._calls.backoff * 2 ** (attempt - 1))
            try:
                return await self._call(name, arguments)
            except Exception as error:
                failed = error
        return self._give_up(name, failed)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        function = self._parts[name].function
        leave = await self._room.enter(function.name, self._timeout_s)
        started = perf_counter()
        try:
            result = await function.within(self._timeout_s, arguments, leave)
        finally:
            spent.add(calls=1, seconds=perf_counter() - started)
        score_of(name, result)
        if isinstance(result, Mapping):
            spent.add(cost=float(result.get("cost") or 0.0))
        self._last[name] = result
        return result

    def _give_up(self, name: str, error: Exception) -> Any:
        spent.add(failures=1)
        on_failure = OnFailure(self._calls.on_failure)
        tries = self._calls.retries + 1
        logger.warning("the reward %s failed %d times, the last time with %r: %s", name, tries, error, on_failure)
        if on_failure is OnFailure.ERROR:
            raise RewardFailed(f"the reward {name} failed {tries} times, the last time with {error!r}") from error
        if on_failure is OnFailure.FAIL:
            raise error
        return _zero(self._last.get(name))

    def _sum(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weighted sum, each function's score under its name, and what else the functions returned."""
        scores = {name: score_of(name, result) for name, result in results.items()}
        others: dict[str, Any] = {}
        for result in reversed(list(results.values())):  # of two that return a value of one name, the first wins
            others |= result if isinstance(result, Mapping) else {}
        total = math.fsum(self._parts[name].weight * score for name, score in scores.items())
        return {**others, **scores, SCORE: total}


def score_of(name: str, result: Any) -> float:
    """Return the score of a function's result, a number or a mapping that has one."""
    score: Any = result.get(SCORE) if isinstance(result, Mapping) else result
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    accepted = f"a finite number, or a mapping with one as {SCORE!r}"
    require(math.isfinite(number), f"the result of the reward {name}", result, accepted)
    return number


def is_number(value: object) -> bool:
    """Return whether a value of a function's result is one number; numpy and torch have their own."""
    if isinstance(value, str | bytes):  # numpy's texts have a dtype too
        return False
    return isinstance(value, bool | int | float) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)


def _zero(last: Any) -> Any:
    """Return a result of 0 under the last result's names, which verl wants of every answer; its texts are not ours."""
    if not isinstance(last, Mapping):
        return 0.0
    return {**{name: 0.0 if is_number(value) else None for name, value in last.items()}, SCORE: 0.0}


def judge(function: Function, **calls: Any) -> Judge:
    """Return a reward function for TRL of one that grades one answer, called as ``goldilocks.rewards`` says.

    ``function(completion, **row)`` is called with an answer and the columns of its row, and returns a number; it may be
    a coroutine function. ``calls`` are keys of the section: ``judge(ask, concurrency=16, timeout=20, retries=3)``.
    """
    refuse_unknown(SECTION, calls, get_type_hints(RewardCalls))
    return Judge(LimitedReward.of(function), RewardCalls(**calls))


class Judge:
    """A reward function for TRL; processes that are spawned are sent it, which a function of a function cannot be."""

    def __init__(self, function: LimitedReward, calls: RewardCalls) -> None:
        self.__name__ = function.name
        self._caller = RewardCaller({function.name: Part(function)}, calls)

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        per_row = {name: column for name, column in columns.items() if _is_column(column, len(completions))}
        rows = [{name: column[place] for name, column in per_row.items()} for place in range(len(completions))]
        return list(await asyncio.gather(*map(partial(_or_none, self._caller), completions, rows)))

    # What ``inspect`` asks a function for, so that ``iscoroutinefunction``, which TRL calls, says yes.
    __code__ = __call__.__code__
    __defaults__ = __kwdefaults__ = None


async def _or_none(caller: RewardCaller, completion: Any, row: dict[str, Any]) -> float | None:
    try:
        return score_of("", await caller(completion=completion, **row))
    except RewardFailed:
        raise
    except Exception:  # logged where the last try failed
        return None


def _is_column(value: Any, rows: int) -> bool:
    several = value.ndim > 0 if isinstance(value, np.ndarray) else isinstance(value, Sequence)
    return several and not isinstance(value, str) and len(value) == rows
