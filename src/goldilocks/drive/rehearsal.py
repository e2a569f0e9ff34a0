"""A policy of the user's own is tried before anything is started: what it raises is said with its key and its place.

The prompts are the run's own. Answers are right as often as a coin, and have whatever metric is asked for.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from goldilocks.core import Exhausted, Source
from goldilocks.drive.backend import Rounds, places
from goldilocks.drive.driver import Driver
from goldilocks.drive.rows import NoRows
from goldilocks.types import Request, Rollout

if TYPE_CHECKING:
    from goldilocks.config.settings import Settings

BATCHES = 2  # the second is chosen and sized by what the first has taught
ROUNDS = 100  # a policy that keeps nothing of coins may yet keep something of a model's answers


class AnyMetric(dict[str, float]):
    """Metrics of a rollout: whatever is asked for is its reward."""

    def __init__(self, reward: float) -> None:
        super().__init__(reward=reward)

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return self["reward"]


class Coins(Rounds):
    """Answers that are right as often as a coin says, for so many rounds."""

    def __init__(self) -> None:
        super().__init__(self._answers)
        self._random = random.Random(0)
        self._rounds = ROUNDS

    def _answers(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        if not self._rounds:
            raise Exhausted(f"{ROUNDS} rounds are enough")
        self._rounds -= 1
        for request, index, _ in places(requests):
            reward = float(self._random.random() < 0.5)
            tokens = self._random.randint(1, 9)
            yield Rollout(request.uid, index, reward=reward, tokens=tokens, metrics=AnyMetric(reward))


def rehearse(settings: Settings, source: Source) -> None:
    """Fill a batch or two with a collector of these settings, if a policy in them is the user's own."""
    named = {f"goldilocks.{kind}": getattr(settings.policies, kind) for kind in ("selector", "allocator", "filter")}
    own = {key: name for key, name in named.items() if isinstance(name, str) and ":" in name}
    if not own:
        return
    try:
        driver = Driver(settings.collector(source), Coins(), NoRows())
        for _ in range(BATCHES):
            driver.batch()
        driver.metrics()
    except Exhausted:
        return
    except Exception as error:
        policies = ", ".join(f"{key}={name!r}" for key, name in own.items())
        modules = (sys.modules[name.partition(":")[0]] for name in own.values())
        files = {getattr(module, "__file__", None) for module in modules}  # a notebook has none
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename in files]
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""  # else the message names it
        raise ValueError(
            f"{policies}: in a rehearsal it raised {type(error).__name__}: {error}{place}; "
            "goldilocks.testing checks a policy of your own"
        ) from error
