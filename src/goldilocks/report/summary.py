"""Figures of the runs: what each spent, its accuracy, and its accuracy at the same number of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from goldilocks.report.run import Run
from goldilocks.report.sections.learning import reward, validation_metrics
from goldilocks.report.sections.rollouts import INFORMATIVE
from goldilocks.report.sections.tokens import accounts
from goldilocks.runs.history import validated_source

ABSENT = "–"
_percent, _share, _tenths, _count = "{:.1%}".format, "{:.3f}".format, "{:.1f}".format, "{:,.0f}".format
JUDGED = "adaptive_rollout/total_rollouts"


@dataclass(frozen=True)
class Figure:
    """One column: a heading, its meaning, and a value for each run. ``best`` marks the highest values."""

    title: str
    about: str
    values: Sequence[str]
    best: Sequence[bool]


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the columns; one without any value is left out."""
    columns = [
        *(column for metric in validation_metrics(runs) for column in _accuracy(runs, metric)),
        _figure("mean reward", "last tenth of the run", runs, _late_reward, _share),
        _figure("updates", "of the policy", runs, lambda run: len(reward(run.history)) or None, _count, ranked=False),
        _figure("rollouts", "all generated", runs, lambda run: run.spending.total("rollouts"), _count, ranked=False),
        _figure("tokens", "all generated", runs, lambda run: run.spending.total("tokens"), _large, ranked=False),
        _figure("wall-clock", "all steps", runs, lambda run: run.spending.total("minutes"), _duration, ranked=False),
        _figure("tokens trained", "of all tokens", runs, _trained_share, _percent),
        _figure("informative groups", "per 1,000 rollouts", runs, _informative, _tenths),
    ]
    return [column for column in columns if any(value != ABSENT for value in column.values)]


def _accuracy(runs: Sequence[Run], metric: str) -> list[Figure]:
    about = f"on {validated_source(metric)}, at the end"
    final = _figure("accuracy", about, runs, lambda run: run.history.last(metric), _percent)
    spent = [run.spending.total("rollouts") for run in runs if run.history.series(metric)]
    known = [total for total in spent if total is not None]
    if len(runs) == 1 or len(known) < len(runs):
        return [final]
    budget = min(known)
    paid = f"after {_large(budget)} each"
    equal = _figure("at equal rollouts", paid, runs, lambda run: _after(run, metric, budget), _percent)
    return [final, equal]


def _after(run: Run, metric: str, rollouts: float) -> float | None:
    """Return the last validation within this many rollouts."""
    found = None
    for step, value in run.history.series(metric).items():
        if (run.spending.until("rollouts", step) or 0.0) <= rollouts:
            found = value
    return found


def _figure(
    title: str,
    about: str,
    runs: Sequence[Run],
    read: Callable[[Run], float | None],
    show: Callable[[float], str],
    *,
    ranked: bool = True,
) -> Figure:
    values = [read(run) for run in runs]
    known = [value for value in values if value is not None]
    compared = ranked and len(known) > 1
    best = [compared and value is not None and show(value) == show(max(known)) for value in values]
    return Figure(title, about, [ABSENT if value is None else show(value) for value in values], best)


def _late_reward(run: Run) -> float | None:
    values = list(reward(run.history).values())
    return fmean(values[-max(len(values) // 10, 1) :]) if values else None


def _trained_share(run: Run) -> float | None:
    totals = {account: list(series.values())[-1] for account, series in accounts(run.history).items()}
    generated = sum(totals.values())
    return totals.get("trained", 0.0) / generated if generated else None


def _informative(run: Run) -> float | None:
    """Return the mean over steps, weighted by the rollouts judged."""
    rates, judged = run.history.series(INFORMATIVE), run.history.series(JUDGED)
    weight = sum(judged.get(step, 0.0) for step in rates)
    return sum(rate * judged.get(step, 0.0) for step, rate in rates.items()) / weight if weight else None


def _large(value: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.0f}"


def _duration(minutes: float) -> str:
    if minutes < 1:
        return f"{60 * minutes:.0f} s"
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{int(minutes // 60)} h {int(minutes % 60):02d} min"
