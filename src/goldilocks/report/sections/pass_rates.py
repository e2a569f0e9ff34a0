"""Difficulty of the prompts: pass rates of the trained groups, and believed pass rates of all visited prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from goldilocks.report.run import Run
from goldilocks.report.sections.base import (
    Plot,
    Point,
    Section,
    by_run,
    data,
    heat_map,
    lacking,
    number_axis,
    rounded,
    titled,
    until_next,
)

# 0 and 1 have bins of their own: such groups teach nothing
BELIEF_BINS = tuple(f"{low / 10:.1f}–{(low + 1) / 10:.1f}" for low in range(10))  # a posterior mean is never 0 or 1
BINS = ("0", *BELIEF_BINS, "1")


def bin_of(rate: float) -> str:
    """Return the bin of a pass rate."""
    if rate <= 0:
        return BINS[0]
    return BINS[-1] if rate >= 1 else BINS[1 + min(int(rate * 10), 9)]


def pass_rates(runs: Sequence[Run]) -> Section:
    """Plot a heat map per run of its trained groups, one of its beliefs, and all beliefs side by side."""
    plots: list[Plot] = []
    for number, run in enumerate(runs):
        trained = {dump.step: [group.pass_rate for group in dump.groups] for dump in run.dumps}
        believed = {one.step: [row.pass_rate for row in one.rows] for one in run.beliefs}
        if trained:
            plots.append(_over_time(number, "trained", titled(runs, run, "Groups trained"), trained, BINS))
        if len(believed) > 1:
            title = titled(runs, run, "Believed pass rates")
            plots.append(_over_time(number, "believed", title, believed, BELIEF_BINS))
    plots += _beliefs_now(runs)
    return Section(
        "pass-rates",
        "How hard the prompts were",
        "The share of prompts at each pass rate. A group at 0 or at 1 teaches nothing: every advantage in it is zero.",
        plots,
        lacking(runs, lambda run: run.dumps, "pass rates of trained groups", "no answers in rollouts/")
        + lacking(runs, lambda run: run.beliefs, "believed pass rates", "no beliefs in checkpoints/"),
    )


def _histogram(rates: Sequence[float]) -> dict[str, float]:
    counts = dict.fromkeys(BINS, 0)
    for rate in rates:
        counts[bin_of(rate)] += 1
    return {name: count / max(len(rates), 1) for name, count in counts.items()}


def _over_time(number: int, kind: str, title: str, rates: Mapping[int, Sequence[float]], bins: Sequence[str]) -> Plot:
    rows: list[Point] = [
        {"from": step, "to": end, "bin": name, "share": rounded(share), "groups": len(rates[step])}
        for step, end in until_next(sorted(rates)).items()
        for name, share in _histogram(rates[step]).items()
        if share
    ]
    order = list(reversed(bins))
    axis = alt.Axis(title="pass rate", grid=False)
    chart = heat_map(
        number,
        alt.Y("bin:O", sort=order, scale=alt.Scale(domain=order), axis=axis),
        alt.Opacity("share:Q", scale=alt.Scale(range=[0.06, 1], type="sqrt"), legend=None),
        alt.Tooltip("bin:O", title="pass rate"),
        alt.Tooltip("share:Q", format=".0%"),
        alt.Tooltip("groups:Q", title="of"),
    )
    return Plot(f"pass-rates-{kind}-{number + 1}", title, chart, rows, hint="darker: more groups")


def _beliefs_now(runs: Sequence[Run]) -> list[Plot]:
    rows: list[Point] = []
    for run in runs:
        if run.beliefs:
            shares = _histogram([row.pass_rate for row in run.beliefs[-1].rows])
            rows += [
                {"run": run.name, "rate": (place + 0.5) / 10, "share": rounded(shares[name])}
                for place, name in enumerate(BELIEF_BINS)
            ]
    if not rows:
        return []
    base = alt.Chart(data()).encode(
        x=alt.X("rate:Q", axis=number_axis("believed pass rate", "~r"), scale=alt.Scale(domain=[0, 1])),
        y=alt.Y("share:Q", axis=number_axis("share of prompts visited", "~%"), stack=None),
        color=by_run(runs),
        tooltip=["run:N", alt.Tooltip("rate:Q", title="pass rate"), alt.Tooltip("share:Q", format=".1%")],
    )
    chart = base.mark_line(interpolate="monotone", point=alt.OverlayMarkDef(size=30))
    return [Plot("beliefs", "Believed pass rates at the last checkpoint", chart, rows, wide=True)]
