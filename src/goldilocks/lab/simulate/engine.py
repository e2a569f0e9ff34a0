"""A simulated engine with slots, and a simulated model that has a pass rate for each prompt.

A rollout's reward and length depend on the seed, the prompt's key, the group's uid, the rollout's index and the pass
rate when it begins, never on what else is in flight. Two engines that get the same requests in another order give the
same answers.

An engine step writes one token in every busy slot. A rollout holds its slot while it waits (prefill, tools, grading: an
exponential time) and while it writes. Its length is that of one of the prompt's answers, where the data say them, and
else log-normal around the prompt's mean. A cancelled rollout costs the tokens that it has written. A paused rollout
keeps its slot and continues where it was; its prefix is not read again.

The model learns from every trained group whose rewards differ. The odds of that prompt are multiplied by e^improvement,
the odds of all prompts by e^(improvement / prompts): half of what is learnt is about the prompt, half about the task.
With ``lift``, the odds of all prompts of its stratum are multiplied by e^lift, and those of the next harder stratum by
half as much: strata rise one after the other, as in a run. A stratum is a value of the column ``lift_by``. A pass rate
of 0 or 1 stays.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from struct import Struct

import numpy as np

from goldilocks.drive.backend import CANCELLED, Unpaused
from goldilocks.errors import require
from goldilocks.lab.simulate.pass_rates import PassRates
from goldilocks.types import Failure, Group, Paused, Prompt, Request, Rollout, is_informative

_NORMAL = NormalDist()
_FIVE_WORDS = Struct("<5Q")
METRICS = {reward: {"acc": reward, "score": reward} for reward in (0.0, 1.0)}  # as a reward function returns them
_UNIT = 2.0**-52  # one bit less than a float holds, so that neither end of (0, 1) is ever reached


@dataclass(frozen=True)
class EngineConfig:
    """``spread``: the standard deviation of log length. ``wait``: how many steps a rollout waits, on average."""

    slots: int = 256
    spread: float = 0.5
    wait: float = 32.0
    max_tokens: int = 16_384
    failure_rate: float = 0.0
    improvement: float = 0.0
    lift: float = 0.0
    lift_by: str = ""

    def __post_init__(self) -> None:
        require(self.slots >= 1, "slots", self.slots, "1 or more")
        require(0 <= self.spread <= 3, "spread", self.spread, "between 0 and 3")
        require(0 <= self.wait < math.inf, "wait", self.wait, "0 or more engine steps")
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        require(0 <= self.failure_rate < 1, "failure_rate", self.failure_rate, "a share of rollouts in [0, 1)")
        for name, gain in (("improvement", self.improvement), ("lift", self.lift)):
            require(0 <= gain <= 100, name, gain, "a gain in log-odds a group, from 0 to 100")


@dataclass(frozen=True, slots=True)
class _Flight:
    """A rollout in its slot: the step at which it begins to write, and what it will turn out to be."""

    writes_from: int
    event: Rollout | Failure


class SimulatedEngine(Unpaused):
    """The backend of a simulation: time passes where a driver waits for events."""

    def __init__(self, prompts: PassRates, config: EngineConfig, *, seed: int) -> None:
        self.config = config
        self.learner = Learner(prompts, config)
        self.clock = self.submitted = 0
        self.budget: float = math.inf  # rollouts that may be submitted in all
        self._seed = seed
        # log-normal: the mean of exp(spread · z) is exp(spread² / 2), which is taken off so that ``tokens`` is the mean
        self._log_tokens = (np.log(prompts.tokens) - config.spread**2 / 2).tolist()
        self._lengths = prompts.lengths
        self._busy = 0
        self._flights: dict[str, dict[int, _Flight]] = {}
        self._finishes: list[tuple[int, int, str, int]] = []  # a heap: when, in which order submitted, uid, index
        self._cancelled: list[Rollout | Failure] = []

    @property
    def free(self) -> int:
        """Slots that nothing occupies."""
        return self.config.slots - self._busy

    @property
    def room(self) -> int:
        return int(min(self.free, self.budget - self.submitted))

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin rollouts; there must be slots for them."""
        for request in requests:
            require(request.n <= self.free, "request.n", request.n, f"at most the {self.free} free slots")
            flights = self._flights.setdefault(request.uid, {})
            for index in range(request.first, request.first + request.n):
                wait, event = self._draw(request.prompt, request.uid, index)
                writes_from = self.clock + wait
                flights[index] = _Flight(writes_from, event)
                heapq.heappush(self._finishes, (writes_from + event.tokens, self.submitted, request.uid, index))
                self.submitted += 1
            self._busy += request.n

    def events(self, within: float | None = None) -> list[Rollout | Failure]:
        """Return the rollouts cancelled since the last call; if there are none, step to those that finish next.

        With a time limit ``within``, only the cancelled ones are returned and no step is made.
        """
        arrived, self._cancelled = self._cancelled, []
        while within is None and self._finishes and (not arrived or self._finishes[0][0] == self.clock):
            finish, _, uid, index = heapq.heappop(self._finishes)
            flight = self._flights.get(uid, {}).pop(index, None)
            if flight is not None:  # None: it was cancelled
                self.clock = finish
                self._leave(uid, 1)
                arrived.append(flight.event)
        return arrived

    def cancel(self, uids: Sequence[str]) -> None:
        """Stop every rollout of these groups; ``events`` reports each with the tokens it had written."""
        for uid in uids:
            flights = self._flights.get(uid, {})
            self._cancelled += [Failure(uid, index, CANCELLED, self._written(one)) for index, one in flights.items()]
            stopped = len(flights)
            flights.clear()
            self._leave(uid, stopped)

    def pause(self) -> list[Paused]:
        """Return what was written: a paused rollout keeps its slot, and time passes only in ``events``."""
        flights = ((uid, index, flight) for uid, group in self._flights.items() for index, flight in group.items())
        return [Paused(uid, index, self._written(flight)) for uid, index, flight in flights]

    def _written(self, flight: _Flight) -> int:
        return min(max(self.clock - flight.writes_from, 0), flight.event.tokens)

    def train(self, batch: Iterable[Group]) -> None:
        """Train the model on a batch; rollouts that begin later are written by the new model."""
        self.learner.train(batch)

    def _leave(self, uid: str, rollouts: int) -> None:
        self._busy -= rollouts
        if not self._flights.get(uid, True):
            del self._flights[uid]

    def _draw(self, prompt: Prompt, uid: str, index: int) -> tuple[int, Rollout | Failure]:
        config = self.config
        name = f"{self._seed}/{prompt.key}/{uid}/{index}".encode()
        words = _FIVE_WORDS.unpack(blake2b(name, digest_size=_FIVE_WORDS.size).digest())
        right, length, waiting, failing, broken = [((word >> 12) + 0.5) * _UNIT for word in words]
        wait = int(-config.wait * math.log(waiting))
        if self._lengths:
            seen = self._lengths[prompt.index]
            longest = round(seen[int(length * len(seen))])
        else:
            longest = round(math.exp(self._log_tokens[prompt.index] + config.spread * _NORMAL.inv_cdf(length)))
        tokens = min(max(longest, 1), config.max_tokens)
        if failing < config.failure_rate:
            return wait, Failure(uid, index, "engine", int(broken * tokens))
        reward = float(right < self.learner.pass_rate(prompt.index))
        return wait, Rollout(uid, index, reward, tokens, METRICS[reward], truncated=longest > config.max_tokens)


class Learner:
    """The simulated model: pass rates that stand still (``improvement=0``) or rise with every informative group."""

    def __init__(self, prompts: PassRates, config: EngineConfig) -> None:
        self._step, self._lift = config.improvement, config.lift
        self._initial = prompts.pass_rate.tolist()
        self._gain = [0.0] * len(prompts)  # in log-odds, beyond the gain common to all prompts
        self._common = 0.0
        # The stratum of each prompt, from the easiest, 0, to the hardest.
        self._strata = prompts.ordered_strata(config.lift_by).tolist() if config.lift else [0] * len(prompts)
        self._lifted = [0.0] * (max(self._strata) + 2)  # by stratum; the last is none's

    def pass_rate(self, index: int) -> float:
        """Return the chance that an answer to this prompt is right now."""
        p, gain = self._initial[index], self._gain[index] + self._common + self._lifted[self._strata[index]]
        return float(p if not gain or p in (0.0, 1.0) else 1 / (1 + (1 - p) / p * math.exp(-gain)))

    def train(self, batch: Iterable[Group]) -> None:
        for group in batch:
            if is_informative(group):
                self._gain[group.prompt.index] += self._step
                self._common += self._step / len(self._gain)
                stratum = self._strata[group.prompt.index]
                self._lifted[stratum] += self._lift
                self._lifted[stratum + 1] += self._lift / 2

    @property
    def mean_pass_rate(self) -> float:
        return math.fsum(map(self.pass_rate, range(len(self._gain)))) / len(self._gain)
