"""``goldilocks forecast RUN``: what would a forecast of pass rates have been worth?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from goldilocks.forecast.hindsight import WORTHS, Hindsight, look_back, read_outcomes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, a directory of verl's rollout dumps, "
        "or a .jsonl, .csv or .parquet file with input, score and step a rollout")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the lines")


def run(args: argparse.Namespace) -> int:
    """Print what the run's rollouts say."""
    found = look_back(read_outcomes(args.run))
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print("\n".join(lines(found)))
    return 0


def lines(found: Hindsight) -> list[str]:
    """The figures, each with what it means."""
    worth, of_mean = _worth(found.worth), _worth(found.worth_of_mean)
    ranks = ", ".join(f"{100 * share:.0f}%" for share in found.informative_by_rank)
    return [
        f"{found.prompts:,} prompts, {found.groups:,} groups, {found.rollouts:,} rollouts; "
        f"{found.scored:,} first visits forecast from the groups before them",
        f"log-loss per rollout: forecast {found.forecast_loss:.3f}, mean of all {found.mean_loss:.3f} "
        f"({100 * found.skill:+.0f}% saved)",
        f"a forecast is worth {worth} rollouts of the prompt; the mean of all {of_mean}",
        f"informative groups: {100 * found.informative:.0f}%; by quarters, forecast nearest a half first: {ranks}",
        f"p(1 - p) of the first quarter: {found.signal_of_best:.2f} times that of all; "
        f"knowing every pass rate: at most {found.ceiling:.2f} times",
        _advice(found),
    ]


def _worth(rollouts: float) -> str:
    return f"over {WORTHS[-1]:,.0f}" if rollouts >= WORTHS[-1] else f"{rollouts:.1f}"


def _advice(found: Hindsight) -> str:
    if found.skill <= 0:
        return "goldilocks.selector=forecast would have stayed uniform: its forecasts were no better than the mean"
    return f"goldilocks.selector=forecast would have used them; goldilocks.selector_kwargs.worth={found.worth:.1f} fits"
