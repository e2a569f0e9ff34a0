"""``goldilocks strata FILE``: would strata know anything of these prompts?

The prompts are divided into ten parts. The pass rates of each part are forecast from the other nine, by what
``goldilocks.prior=strata`` would believe of prompts never tried. The share of the variance between prompts that the
forecasts explain says how much strata know. Answers to one prompt differ by chance; that variance is not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from goldilocks.core.beliefs import Beliefs
from goldilocks.core.strata import StrataSettings
from goldilocks.errors import require
from goldilocks.lab.simulate.pass_rates import PassRates, read_pass_rates
from goldilocks.sheet import Sheet

PARTS = 10
ENOUGH = 100  # prompts: of fewer, strata that know a lot are not told from those that know nothing
MOST = 4_096  # prompts, a sample of more
LITTLE = 0.05  # share of the variance: strata that explain less would not help
MORE = 1.1  # signal of what strata would choose, over that of all: with less they would not help
WIDEST = 160  # columns, also on a narrower terminal
LEGEND = """\
strata: over all divisions; explained: share of the variance between prompts that strata forecast of
prompts held out, ± two standard errors; signal: p(1 - p) of the quarter that is believed nearest a
half, over that of all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help=".jsonl, .csv or .parquet with pass_rate or rewards "
        "per prompt, or score per rollout; or a directory of verl's rollout_data_dir dumps")  # fmt: skip
    parser.add_argument("--columns", metavar="NAME,NAME", default="", help="columns of FILE that divide the prompts, "
        "as goldilocks.strata.columns does; strata by the text are judged beside them")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print what strata by the columns and strata by the text know, and whether they would help."""
    prompts = read_pass_rates(args.file)
    columns = [name for name in args.columns.split(",") if name]
    rows = []
    for by in [columns, []] if columns else [[]]:
        one = judge(prompts, by)
        share, best = f"{round(one.explained, 2) + 0:.0%} ± {2 * one.error:.0%}", f"{one.signal:.2f}"
        rows.append([", ".join(by) or "text", f"{one.strata:,}", share, best, "yes" if one.helps else "no"])
    console = Console(width=WIDEST)
    console.print(f"{len(prompts):,} prompts, mean pass rate {prompts.pass_rate.mean():.3f}\n", highlight=False)
    console.print(Sheet(["strata by", "strata", "explained", "signal", "would help"], rows).on_terminal())
    console.print(f"\n{LEGEND}", highlight=False)
    return 0


@dataclass(frozen=True)
class Judged:
    """What strata know of prompts that were held out."""

    strata: int  # over all divisions
    explained: float  # share of the variance between prompts
    error: float  # standard error of that share
    signal: float  # p(1 − p) of the quarter believed nearest a half, over that of all

    @property
    def helps(self) -> bool:
        """Whether strata know something, beyond two standard errors, and choose better prompts by it."""
        return self.explained > max(LITTLE, 2 * self.error) and self.signal > MORE


def judge(prompts: PassRates, columns: Sequence[str]) -> Judged:
    """Return what strata by these columns know; without columns, what strata by the text know."""
    source = prompts.source()
    divisions = StrataSettings(columns).of(source)
    rate, trials = prompts.pass_rate, np.broadcast_to(prompts.trials, len(prompts))
    rows = np.flatnonzero(trials > 1)  # a single answer does not show how much is chance
    require(len(rows) >= ENOUGH, "FILE", f"{len(rows)} prompts with several answers", f"{ENOUGH} or more")
    if len(rows) > MOST:
        rows = np.sort(np.random.default_rng(0).choice(rows, MOST, replace=False))

    def beliefs_from(tried: np.ndarray) -> Beliefs:
        beliefs = Beliefs(source.keys(), divisions=divisions)
        for place, row in enumerate(np.random.default_rng(1).permutation(tried).tolist()):
            beliefs.learn_rate(row, round(rate[row] * trials[row]), int(trials[row]))
            if place % 32 == 31:
                beliefs.trained([])
        return beliefs

    chance = rate * (1 - rate) / np.maximum(trials - 1, 1)  # variance of the mean of a prompt's answers
    signal = trials * chance
    squares, saved, best = np.zeros(len(rate)), np.zeros(len(rate)), []
    for part in np.array_split(np.random.default_rng(0).permutation(rows), PARTS):
        others = np.setdiff1d(rows, part)
        forecast = beliefs_from(others).pass_rate(part)
        squares[part] = (rate[part] - rate[others].mean()) ** 2
        saved[part] = squares[part] - (rate[part] - forecast) ** 2
        # Of prompts that are believed alike, to a hundredth, any may be chosen: each counts as their mean.
        _, alike = np.unique(np.abs(forecast.round(2) - 0.5).round(2), return_inverse=True)
        expected = np.bincount(alike, signal[part]) / np.bincount(alike)
        best.append(expected[np.sort(alike)][: len(part) // 4])
    between = (squares - chance)[rows].mean()
    share = 1 / between if between > 0 else 0.0  # else prompts differ by chance alone
    of_all = signal[rows].mean()
    return Judged(
        strata=sum(len(one.keys) for one in divisions),
        explained=float(saved[rows].mean() * share),
        error=float(saved[rows].std() / np.sqrt(len(rows)) * share),
        signal=float(np.concatenate(best).mean() / of_all) if of_all else 1.0,
    )
