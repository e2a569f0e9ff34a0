"""Difficulty of the prompts: pass rates of the trained groups, and believed pass rates of all visited prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from goldilocks.report.run import Run
from goldilocks.report.sections.base import Plot, Point, Section, by_run, data, number_axis, rounded, step_axis, titled
from goldilocks.report.theme import run_colour

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
            plots.append(
                _over_time(number, "believed", titled(runs, run, "Believed pass rates"), believed, BELIEF_BINS)
            )
    latest = _beliefs_now(runs)
    plots += [latest] if latest else []
    return Section(
        "pass-rates",
        "How hard the prompts were",
        "The share of prompts at each pass rate. A group at 0 or at 1 teaches nothing: every advantage in it is zero.",
        plots,
        _notes(runs),
    )


def _notes(runs: Sequence[Run]) -> list[str]:
    def of(names: Sequence[str]) -> str:
        return "" if len(runs) == len(names) else f" ({', '.join(names)})"

    no_dumps, no_beliefs = [r.name for r in runs if not r.dumps], [r.name for r in runs if not r.beliefs]
    notes = [f"pass rates of trained groups: no answers in rollouts/{of(no_dumps)}"] if no_dumps else []
    return notes + ([f"believed pass rates: no beliefs in checkpoints/{of(no_beliefs)}"] if no_beliefs else [])


def _histogram(rates: Sequence[float]) -> dict[str, float]:
    counts = dict.fromkeys(BINS, 0)
    for rate in rates:
        counts[bin_of(rate)] += 1
    return {name: count / max(len(rates), 1) for name, count in counts.items()}


def _over_time(number: int, kind: str, title: str, rates: Mapping[int, Sequence[float]], bins: Sequence[str]) -> Plot:
    steps = sorted(rates)
    ends = [*steps[1:], 2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1]
    rows: list[Point] = [
        {"from": step, "to": end, "bin": name, "share": rounded(share), "groups": len(rates[step])}
        for step, end in zip(steps, ends, strict=True)
        for name, share in _histogram(rates[step]).items()
        if share
    ]
    chart = (
        alt.Chart(data())
        .mark_rect(fill=run_colour(number), stroke=None)
        .encode(
            x=step_axis("from"),
            x2=alt.X2("to:Q"),
            y=alt.Y("bin:O", sort=list(reversed(bins)), scale=alt.Scale(domain=list(reversed(bins))),
                    axis=alt.Axis(title="pass rate", grid=False)),
            opacity=alt.Opacity("share:Q", scale=alt.Scale(range=[0.06, 1], type="sqrt"), legend=None),
            tooltip=[alt.Tooltip("from:Q", title="step"), alt.Tooltip("bin:O", title="pass rate"),
                     alt.Tooltip("share:Q", format=".0%"), alt.Tooltip("groups:Q", title="of")],
        )
    )  # fmt: skip
    return Plot(f"pass-rates-{kind}-{number + 1}", title, chart, rows, hint="darker: more groups")


def _beliefs_now(runs: Sequence[Run]) -> Plot | None:
    rows: list[Point] = []
    for run in runs:
        if run.beliefs:
            shares = _histogram([row.pass_rate for row in run.beliefs[-1].rows])
            rows += [
                {"run": run.name, "rate": (place + 0.5) / 10, "share": rounded(shares[name])}
                for place, name in enumerate(BELIEF_BINS)
            ]
    if not rows:
        return None
    base = alt.Chart(data()).encode(
        x=alt.X("rate:Q", axis=number_axis("believed pass rate", "~r"),
                scale=alt.Scale(domain=[0, 1])),
        y=alt.Y("share:Q", axis=number_axis("share of prompts visited", "~%"), stack=None),
        color=by_run(runs),
        tooltip=[alt.Tooltip("run:N"), alt.Tooltip("rate:Q", title="pass rate"), alt.Tooltip("share:Q", format=".1%")],
    )  # fmt: skip
    chart = base.mark_line(interpolate="monotone", point=alt.OverlayMarkDef(size=30))
    return Plot("beliefs", "Believed pass rates at the last checkpoint", chart, rows, wide=True)
