"""``goldilocks forecast RUN``: what would priors have known of prompts never tried?

A run's groups are gone through in their order. The first visit to each prompt is forecast, as with
``goldilocks.prior=strata`` or ``forecast``, from the groups of earlier steps alone, and the forecast is scored. Later
visits are not scored: a prompt that was tried is known by its own rollouts.

``goldilocks pass-rates --hidden-states`` writes the model's hidden states beside its file. Where they are there, the
regression on them (``goldilocks.features.kind=hidden``) is scored too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from goldilocks.core import Beliefs, ListSource
from goldilocks.core.beliefs import log_loss
from goldilocks.core.forecast import Forecast
from goldilocks.core.priors import Prior, Strata
from goldilocks.core.strata import StrataSettings
from goldilocks.errors import require
from goldilocks.features import Features
from goldilocks.runs.records import Record, columns_of, first_column, group_uids, number, read_records
from goldilocks.types import POSITIVE_THRESHOLD, Group, Rollout

WORTHS = np.geomspace(0.1, 1000, 161)  # rollouts
RANKS = 4
ENOUGH = 32  # first visits, after those of the first step
SETTINGS = {
    "strata": "goldilocks.prior=strata",
    "strata_text": "goldilocks.prior=strata without columns",
    "forecast": "goldilocks.prior=forecast",
    "hidden": "goldilocks.prior=forecast with goldilocks.features.kind=hidden",
}
LITTLE = 0.02  # of the mean's log-loss: a prior that saves less is not recommended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, a directory of verl's rollout dumps, "
        "or a .jsonl, .csv or .parquet file with input, score and step a rollout")  # fmt: skip
    parser.add_argument("--column", metavar="NAME", action="append", default=[], help="a column of the rollouts for "
        "strata and features, such as level; again for another (default: strata by the text)")  # fmt: skip
    parser.add_argument("--hidden-states", metavar="FILE", type=Path, help="the model's hidden states, a row for each "
        "prompt in the order of RUN (default: the .npy beside a file, where there is one)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the lines")


def run(args: argparse.Namespace) -> int:
    """Print what the run's rollouts say."""
    outcomes = read_outcomes(args.run)
    beside = args.run.with_suffix(".npy")  # where ``goldilocks pass-rates --hidden-states`` writes them
    path = args.hidden_states or (beside if args.run.is_file() and beside.is_file() else None)
    found = look_back_all(outcomes, args.column, read_hidden_states(path, len(outcomes.prompts)) if path else None)
    if args.json:
        print(json.dumps({prior: one.as_dict() for prior, one in found.items()}, indent=2))
    else:
        print("\n".join(lines(found)))
    return 0


@dataclass(frozen=True)
class Outcomes:
    """Groups in the order of their steps: which prompt, at which step, passes among trials."""

    prompts: ListSource  # what they say, and the other columns of their rows
    prompt: np.ndarray
    step: np.ndarray
    passes: np.ndarray
    trials: np.ndarray


@dataclass(frozen=True)
class Hindsight:
    """``worth``: rollouts of a prompt that a forecast counts as; ``worth_of_mean``: the same of the mean of all."""

    prompts: int
    groups: int
    rollouts: int
    scored: int
    forecast_loss: float
    mean_loss: float
    worth: float
    worth_of_mean: float
    informative: float  # share of the scored groups whose rollouts differ
    informative_by_rank: tuple[float, ...]  # the same by quarters, the forecast nearest a half first
    signal_of_best: float  # p(1 − p) of the first quarter over that of all
    ceiling: float  # 0.25 / mean p(1 − p): what knowing every pass rate could bring at most

    @property
    def skill(self) -> float:
        """Return the share of the mean's log-loss that the forecast saves."""
        return 1 - self.forecast_loss / self.mean_loss if self.mean_loss else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "skill": self.skill}


def read_outcomes(path: Path) -> Outcomes:
    """Read the groups of a run directory, of a directory of verl's dumps, or of a file of rollouts."""
    rows = read_records(path / "rollouts" if (path / "rollouts").is_dir() else path)
    groups: dict[str, list[Record]] = {}
    for row, uid in zip(rows, group_uids(rows), strict=True):
        groups.setdefault(uid, []).append(row)
    return _outcomes(list(groups.values()), path)


def _outcomes(in_file: Sequence[Sequence[Record]], path: Path) -> Outcomes:
    """Return the groups by their steps. The prompts stay in the order of the file, as hidden states have them."""
    column = first_column(("input", "prompt"), in_file[0][0])
    require(column is not None, "RUN", str(path), "rollouts with a column input or prompt, score and step")
    places: dict[str, int] = {}
    for group in in_file:
        places.setdefault(str(group[0][str(column)]), len(places))
    groups = sorted(in_file, key=lambda group: number(group[0], "step"))
    prompt = [places[str(group[0][str(column)])] for group in groups]
    first = {place: group[0] for place, group in reversed(list(zip(prompt, groups, strict=True)))}
    columns = columns_of([first[place] for place in range(len(places))])
    passes = [sum(number(row, "score") >= POSITIVE_THRESHOLD for row in group) for group in groups]
    steps = [number(group[0], "step") for group in groups]
    trials = [len(group) for group in groups]
    source = ListSource(list(places), columns=columns)
    return Outcomes(source, np.array(prompt), np.array(steps), np.array(passes, float), np.array(trials, float))


def read_hidden_states(path: Path, prompts: int) -> np.ndarray:
    """Return the hidden states of so many prompts, a row each."""
    try:
        states = np.load(path, allow_pickle=False)
        shape = tuple(states.shape)
        finite = bool(np.isfinite(states).all())
    except (OSError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"--hidden-states={str(path)!r} is not accepted: a .npy file of numbers: {error}") from None
    accepted = f"{prompts:,} rows, one for each prompt of RUN, and not the shape {shape}"
    require(len(shape) == 2 and shape[0] == prompts, "--hidden-states", str(path), accepted)
    require(finite, "--hidden-states", str(path), "finite numbers")
    return np.asarray(states, dtype=np.float64)


def look_back_all(
    outcomes: Outcomes, columns: Sequence[str] = (), hidden_states: np.ndarray | None = None
) -> dict[str, Hindsight]:
    """Score every prior: with the columns, strata without them, and the regression on hidden states where given."""
    found = {"strata": look_back(outcomes, "strata", columns)}
    if columns:
        found["strata_text"] = look_back(outcomes, "strata")
    found["forecast"] = look_back(outcomes, "forecast", columns)
    if hidden_states is not None:
        found["hidden"] = look_back(outcomes, "forecast", columns, hidden_states)
    return found


def look_back(
    outcomes: Outcomes, prior: str = "forecast", columns: Sequence[str] = (), hidden_states: np.ndarray | None = None
) -> Hindsight:
    """Score the forecasts that a prior would have made.

    ``columns`` of the rollouts are its strata, or features beside the text or the hidden states, a row per prompt.
    """
    scored, forecasts, means = _forecasts(outcomes, _prior(prior, outcomes.prompts, columns, hidden_states))
    require(len(scored) >= ENOUGH, "RUN", f"{len(scored)} first visits", f"{ENOUGH} or more after the first step")
    passes, trials = outcomes.passes[scored], outcomes.trials[scored]
    several = trials > 1
    enough = several.sum() >= RANKS
    require(enough, "RUN", f"{several.sum()} groups of several rollouts", f"{RANKS} or more after the first step")
    spread = (passes * (trials - passes) / (trials * (trials - 1)).clip(1))[several]  # p(1 − p) without bias
    steps = outcomes.step[scored]
    ranks, ranks_of_several = _ranks(forecasts, steps), _ranks(forecasts[several], steps[several])
    informative = (passes > 0) & (passes < trials)
    return Hindsight(
        prompts=len(outcomes.prompts),
        groups=len(outcomes.step),
        rollouts=int(outcomes.trials.sum()),
        scored=len(scored),
        forecast_loss=_loss(forecasts, passes / trials),
        mean_loss=_loss(means, passes / trials),
        worth=_worth(forecasts, passes, trials),
        worth_of_mean=_worth(means, passes, trials),
        informative=float(informative.mean()),
        informative_by_rank=tuple(float(informative[ranks == rank].mean()) for rank in range(RANKS)),
        signal_of_best=float(spread[ranks_of_several == 0].mean() / max(spread.mean(), 1e-9)),
        ceiling=float(0.25 / max(spread.mean(), 1e-9)),
    )


def _prior(name: str, prompts: ListSource, columns: Sequence[str], hidden_states: np.ndarray | None) -> Prior:
    if name == "strata":
        return Strata(StrataSettings(list(columns)).of(prompts))
    if hidden_states is None:
        return Forecast(Features(columns=list(columns)).of(prompts), prompts.keys())
    features = Features("hidden", list(columns)).of(prompts, lambda: hidden_states)
    return Forecast(features, prompts.keys())


def _forecasts(outcomes: Outcomes, prior: Prior) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first visits after the first step, the forecast of each, and the mean of all groups before it."""
    beliefs = Beliefs(outcomes.prompts.keys(), prior=prior)
    seen, passes, trials = np.zeros(len(beliefs), dtype=bool), 1.0, 2.0
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for place, step in enumerate(np.unique(outcomes.step)):
        groups = np.flatnonzero(outcomes.step == step)
        prompts = outcomes.prompt[groups]
        fresh = groups[~seen[prompts]]
        if place:
            mean = np.full(len(fresh), passes / trials)
            parts.append((fresh, beliefs.pass_rate(outcomes.prompt[fresh]).astype(np.float64), mean))
        for group in groups.tolist():
            _record(beliefs, outcomes, group, place)
        passes, trials = passes + outcomes.passes[groups].sum(), trials + outcomes.trials[groups].sum()
        seen[prompts] = True
    none = (np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))
    scored, forecasts, means = (np.concatenate(column) for column in zip(none, *parts, strict=True))
    return scored, forecasts, means


def _record(beliefs: Beliefs, outcomes: Outcomes, group: int, step: int) -> None:
    passes, trials = int(outcomes.passes[group]), int(outcomes.trials[group])
    rollouts = tuple(Rollout("g0", index, float(index < passes), 1) for index in range(trials))
    prompt = outcomes.prompts[int(outcomes.prompt[group])]
    beliefs.record(Group("g0", prompt, rollouts, trials, step), informative=0 < passes < trials, step=step)


def _loss(forecasts: np.ndarray, rates: np.ndarray) -> float:
    return float(np.mean([log_loss(p, rate) for p, rate in zip(forecasts, rates, strict=True)]))


def _ranks(forecasts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the quarter of its step that each forecast is in, the nearest to a half first.

    Steps with fewer forecasts than quarters are put together. ``steps`` are in order.
    """
    ranks = np.zeros(len(forecasts), dtype=np.int64)
    starts = [0]
    for start in (np.flatnonzero(np.diff(steps)) + 1).tolist():
        if min(start - starts[-1], len(steps) - start) >= RANKS:
            starts.append(start)
    for own in np.split(np.arange(len(steps)), starts[1:]):
        order = np.argsort(np.abs(forecasts[own] - 0.5), kind="stable")
        ranks[own[order]] = np.arange(len(own)) * RANKS // len(own)
    return ranks


def _worth(forecasts: np.ndarray, passes: np.ndarray, trials: np.ndarray) -> float:
    """Return the strength at which a beta-binomial around the forecasts makes the outcomes most probable.

    The likelihood is that of a Pólya urn of right and wrong balls, up to a term that no strength changes.
    """
    p = np.clip(forecasts, 0.01, 0.99)
    right, of_right = _draws(p, passes)
    wrong, of_wrong = _draws(1 - p, trials - passes)
    _, all_drawn = _draws(p, trials)

    def log_likelihood(worth: float) -> float:
        drawn = np.log(worth * right + of_right).sum() + np.log(worth * wrong + of_wrong).sum()
        return float(drawn - np.log(worth + all_drawn).sum())

    return float(max(WORTHS, key=log_likelihood))


def _draws(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each value as often as its count says, and the number of each repetition, from 0."""
    whole = counts.astype(np.int64)
    return np.repeat(values, whole), np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)


def lines(found: Mapping[str, Hindsight]) -> list[str]:
    """Return the lines to print, each figure with its meaning."""
    any_ = next(iter(found.values()))
    return [
        f"{any_.prompts:,} prompts, {any_.groups:,} groups, {any_.rollouts:,} rollouts; "
        f"{any_.scored:,} first visits forecast from the groups before them",
        f"informative groups: {100 * any_.informative:.0f}%; knowing every pass rate: at most {any_.ceiling:.2f} times "
        "p(1 - p)",
        "",
        f"{'':<12}log-loss  saved  worth in  informative by quarters,  p(1 - p) of the",
        f"{'prior':<12}{'':<8}  {'':<5}  rollouts  nearest a half first     first quarter",
        f"{'mean':<12}{any_.mean_loss:8.3f}  {'':<5}  {_shown_worth(any_.worth_of_mean):>8}",
        *(_line(prior, one) for prior, one in found.items()),
        "",
        _advice(found),
    ]


def _line(prior: str, one: Hindsight) -> str:
    ranks = ", ".join(f"{100 * share:.0f}%" for share in one.informative_by_rank)
    return (
        f"{prior:<12}{one.forecast_loss:8.3f}  {100 * one.skill:+4.0f}%  {_shown_worth(one.worth):>8}  {ranks:<24} "
        f"{one.signal_of_best:.2f} times that of all"
    )


def _shown_worth(rollouts: float) -> str:
    return f"over {WORTHS[-1]:,.0f}" if rollouts >= WORTHS[-1] else f"{rollouts:.1f}"


def _advice(found: Mapping[str, Hindsight]) -> str:
    best = max(found, key=lambda prior: found[prior].skill)
    if found[best].skill <= LITTLE:
        return "no prior would have known more than the mean: goldilocks.prior=flat is as good"
    return f"{SETTINGS[best]} would have known most"
