"""``goldilocks forecast RUN``: what would priors have known of prompts never tried?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from goldilocks.forecast.hindsight import WORTHS, Hindsight, look_back, read_outcomes

PRIORS = ("strata", "forecast")
LITTLE = 0.02  # of the mean's log-loss: no prior is worth a line that saves less


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, a directory of verl's rollout dumps, "
        "or a .jsonl, .csv or .parquet file with input, score and step a rollout")  # fmt: skip
    parser.add_argument("--column", metavar="NAME", action="append", default=[], help="a column of the rollouts for "
        "strata and features, such as level; again for another (default: strata by the text)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the lines")


def run(args: argparse.Namespace) -> int:
    """Print what the run's rollouts say."""
    outcomes = read_outcomes(args.run)
    found = {prior: look_back(outcomes, prior, args.column) for prior in PRIORS}
    if args.json:
        print(json.dumps({prior: one.as_dict() for prior, one in found.items()}, indent=2))
    else:
        print("\n".join(lines(found)))
    return 0


def lines(found: Mapping[str, Hindsight]) -> list[str]:
    """The figures, each with what it means."""
    any_ = next(iter(found.values()))
    return [
        f"{any_.prompts:,} prompts, {any_.groups:,} groups, {any_.rollouts:,} rollouts; "
        f"{any_.scored:,} first visits forecast from the groups before them",
        f"informative groups: {100 * any_.informative:.0f}%; knowing every pass rate: at most {any_.ceiling:.2f} times "
        "p(1 - p)",
        "",
        f"{'':<12}log-loss  saved  worth in  informative by quarters,  p(1 - p) of the",
        f"{'prior':<12}{'':<8}  {'':<5}  rollouts  nearest a half first     first quarter",
        f"{'mean':<12}{any_.mean_loss:8.3f}  {'':<5}  {_worth(any_.worth_of_mean):>8}",
        *(_line(prior, one) for prior, one in found.items()),
        "",
        _advice(found),
    ]


def _line(prior: str, one: Hindsight) -> str:
    ranks = ", ".join(f"{100 * share:.0f}%" for share in one.informative_by_rank)
    return (
        f"{prior:<12}{one.forecast_loss:8.3f}  {100 * one.skill:+4.0f}%  {_worth(one.worth):>8}  {ranks:<24} "
        f"{one.signal_of_best:.2f} times that of all"
    )


def _worth(rollouts: float) -> str:
    return f"over {WORTHS[-1]:,.0f}" if rollouts >= WORTHS[-1] else f"{rollouts:.1f}"


def _advice(found: Mapping[str, Hindsight]) -> str:
    best = max(found, key=lambda prior: found[prior].skill)
    if found[best].skill <= LITTLE:
        return "no prior would have known more than the mean: goldilocks.prior=flat is as good"
    return f"goldilocks.prior={best} would have known most"
