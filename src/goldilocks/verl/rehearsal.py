"""A policy of the user's own is tried before any worker is started: what it raises is said with its key and its place.

The prompts are the run's own. Answers are right as often as a coin, and have whatever metric is asked for.
"""

from __future__ import annotations

import random
import traceback

from goldilocks.core import Collector, Exhausted, Source
from goldilocks.settings import Settings
from goldilocks.types import Request, Rollout

BATCHES = 2  # the second is chosen and sized by what the first has taught
TURNS = 100  # a policy that keeps nothing of coins may yet keep something of a model's answers


class AnyMetric(dict[str, float]):
    """Metrics of a rollout: whatever is asked for is its reward."""

    def __init__(self, reward: float) -> None:
        super().__init__(reward=reward)

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return self["reward"]


def rehearse(settings: Settings, source: Source) -> None:
    """Fill a batch or two with a collector of these settings, if a policy in them is the user's own."""
    own = settings.own_policies
    if not own:
        return
    try:
        _fill(settings.collector(source))
    except Exhausted:
        return
    except Exception as error:
        policies = ", ".join(f"{key}={name!r}" for key, name in own.items())
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{policies}: in a rehearsal it raised {type(error).__name__}: {error} ({place.filename}:{place.lineno}); "
            "goldilocks.testing checks a policy of your own"
        ) from error


def _fill(collector: Collector) -> None:
    coin = random.Random(0)
    turns = TURNS
    for _ in range(BATCHES):
        while not collector.ready:
            for request in collector.requests():
                _answer(collector, request, coin)
            turns -= 1
            if not turns:
                return
        collector.take()
    collector.metrics()


def _answer(collector: Collector, request: Request, coin: random.Random) -> None:
    for index in range(request.first, request.first + request.n):
        reward = float(coin.random() < 0.5)
        metrics = AnyMetric(reward)
        collector.observe(Rollout(request.uid, index, reward=reward, tokens=coin.randint(1, 9), metrics=metrics))
