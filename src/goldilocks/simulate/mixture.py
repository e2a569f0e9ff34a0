"""The built-in data set: 2,000 prompts, as mixed in difficulty as reasoning data are for a model at its start.

It does not depend on the seed of a simulation, so two seeds differ by sampling alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goldilocks.simulate.pass_rates import PassRates

LONGEST, SHORTEST = 1400, 200  # mean tokens of an answer that is never right, and of one that always is


@dataclass(frozen=True)
class Difficulty:
    """``prompts`` prompts with pass rates spread evenly from ``lowest`` to ``highest``."""

    name: str
    prompts: int
    lowest: float
    highest: float


DIFFICULTIES = (
    Difficulty("impossible", 400, 0.0, 0.0),
    Difficulty("hard", 500, 0.01, 0.2),
    Difficulty("medium", 500, 0.2, 0.8),
    Difficulty("easy", 300, 0.8, 0.99),
    Difficulty("trivial", 300, 1.0, 1.0),
)


def mixture() -> PassRates:
    """The built-in data set. Harder prompts have longer answers: a geometric path from SHORTEST to LONGEST."""
    rates = np.concatenate([np.linspace(one.lowest, one.highest, one.prompts) for one in DIFFICULTIES])
    names = tuple(f"{one.name} {number}" for one in DIFFICULTIES for number in range(one.prompts))
    # The names tell the difficulty: a forecast must not read them.
    return PassRates(names, rates, LONGEST * (SHORTEST / LONGEST) ** rates, readable=False)
