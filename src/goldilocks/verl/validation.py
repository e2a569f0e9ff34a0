"""verl's figures of a validation with several answers to a problem.

verl takes the best, the worst and the vote of a thousand draws from a problem's answers, one draw after the other,
while the GPU waits. Here all draws are one array. The figures are equal to the last digit.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NONE = type(None)
MOST_VOTES = 128  # of a problem: with more, verl's loop is quicker
PLAIN: Any = (int, float, np.int64, np.bool_)  # in order as their float64 are; numpy rounds a float beside a float32


def validation_figures(sources: Any, uids: Any, infos: Any, expected: Mapping[Any, int]) -> dict[str, float] | None:
    """Return verl's metrics of the answers; None where one is no plain number, or its vote no text."""
    numbers: dict[str, Any] = {name: values for name, values in infos.items() if {*map(type, values)} - {str, NONE}}
    given = [one for values in numbers.values() for one in values if one is not None]
    plain = all(isinstance(one, PLAIN) and abs(one) < 2**53 for one in given) and "pred" not in numbers
    if not plain or (expected and not expected.keys() >= {*zip(sources, uids, strict=True)}):
        return None
    if expected and "acc" in numbers:
        numbers["acc_success_only"] = numbers["acc"]
    votes: dict[Any, list[Any]] = defaultdict(list)
    for source, uid, vote in zip(sources, uids, infos.get("pred", ()), strict=False):
        votes[source, uid].append(vote)
    if max(map(len, votes.values()), default=0) > MOST_VOTES:
        return None
    table: dict[Any, Any] = defaultdict(lambda: defaultdict(list))  # of a source and a variable: answers by problem
    for name, values in numbers.items():
        for source, uid, value in zip(sources, uids, values, strict=False):  # verl's list of rewards may go on
            if value is not None:
                table[source, name][uid].append(value)
    for (source, uid), count in expected.items():
        if (source, "acc") in table:  # an answer that failed is wrong
            table[source, "acc"][uid] += [0.0] * (count - len(table[source, "acc"][uid]))
    # verl adds up over problems as they first came, also those whose first answer has no value, then those that failed.
    order = {key: place for place, key in enumerate({**dict.fromkeys(zip(sources, uids, strict=True)), **expected})}
    metrics = {}
    for (source, name), answers in table.items():
        problems = {uid: answers[uid] for _, uid in sorted((order[source, uid], uid) for uid in answers)}
        is_core, most = name == ("acc" if (source, "acc") in table else "reward"), max(map(len, problems.values()))
        heads = (f"mean@{most}", f"maj@{most}/", f"best@{most}/")
        for figure, values in _figures([*problems.values()], [votes[source, uid] for uid in problems]).items():
            section = "core" if is_core and figure.startswith(heads) else "aux"
            metrics[f"val-{section}/{source}/{name}/{figure}"] = values
    return metrics


def _figures(problems: Sequence[Sequence[float]], votes: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return verl's figures of a problem, each the mean over the problems with as many answers."""
    found: dict[str, np.ndarray] = defaultdict(lambda: np.full(len(problems), np.nan))
    for size in {*map(len, problems)} - {0}:
        places = [place for place, answers in enumerate(problems) if len(answers) == size]
        values = np.array([problems[place] for place in places], dtype=np.float64)
        voting = [row for row, place in enumerate(places) if len(votes[place]) == size and None not in votes[place]]
        ballots = np.array([[votes[places[row]].index(vote) for vote in votes[places[row]]] for row in voting])
        found[f"mean@{size}"][places] = values.mean(axis=1)
        if size > 1:
            found[f"std@{size}"][places] = values.std(axis=1)
        for drawn in {size, *(2**power for power in range(1, (size - 1).bit_length()))} - {1}:
            draws = np.random.RandomState(42).choice(size, size=(1000, drawn))  # verl's seed and number
            chosen = {
                name: (places, functools.reduce(better, (values.take(column, axis=1) for column in draws.T)))
                for name, better in (("best", np.maximum), ("worst", np.minimum))
            }
            if voting:
                chosen["maj"] = [places[row] for row in voting], _of_most_votes(values[voting], ballots, draws)
            for name, (whose, figures) in chosen.items():
                found[f"{name}@{drawn}/mean"][whose] = figures.mean(axis=1)
                found[f"{name}@{drawn}/std"][whose] = figures.std(axis=1)
    return {figure: np.mean(of_each[~np.isnan(of_each)]) for figure, of_each in found.items()}


def _of_most_votes(values: np.ndarray, ballots: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return for each problem and draw the value of the vote that is cast most, of equals the one cast first."""
    found = np.empty((len(values), len(draws)))
    for row, (of_answers, votes) in enumerate(zip(values, ballots[:, draws], strict=True)):
        first = (votes[:, :, None] == votes[:, None, :]).sum(axis=2).argmax(axis=1)
        found[row] = of_answers[np.take_along_axis(draws, first[:, None], axis=1)[:, 0]]
    return found
