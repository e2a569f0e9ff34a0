"""The prompts: their difficulty, the rollouts and informative groups of each, and the length of kept answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section, run_colour
from goldilocks.lab.report.run import Run

MEAN = "adaptive_rollout/avg_rollouts_per_sample"
FEWEST = "adaptive_rollout/min_rollouts_per_sample"
MOST = "adaptive_rollout/max_rollouts_per_sample"
INFORMATIVE = "adaptive_rollout/informative_groups_per_1k_rollouts"
GENERATED = ("length/generated_mean", "response_length/mean")  # a run without a collector trains everything
KEPT = "length/kept_mean"
RATIO = "length/kept_over_generated"

# 0 and 1 have bins of their own: such groups teach nothing
BELIEF_BINS = tuple(f"{low / 10:.1f}–{(low + 1) / 10:.1f}" for low in range(10))  # a posterior mean is never 0 or 1
BINS = ("0", *BELIEF_BINS, "1")


def rollouts(runs: Sequence[Run]) -> Section:
    """Plot rollouts per prompt and informative groups per 1,000 rollouts."""
    informative = draw.trend_plot(
        runs,
        "informative-groups",
        "Informative groups",
        ("groups", "groups per 1,000 rollouts"),
        lambda run: run.history.series(INFORMATIVE),
        scale=alt.Scale(zero=True),
        hint="groups whose rewards differ",
    )
    return Section(
        "rollouts",
        "Rollouts per prompt",
        "How many rollouts a prompt got before it was judged, and how many groups with differing rewards they gave.",
        [*_given(runs), *informative],
        draw.lacking(runs, lambda run: run.history.series(MEAN), "rollouts per prompt")
        + draw.lacking(runs, lambda run: run.history.series(INFORMATIVE), "informative groups"),
    )


def _given(runs: Sequence[Run]) -> list[Plot]:
    """Plot rollouts per prompt on a log scale, since policies differ by factors; steps without a group are left out."""
    rows = [row for run in runs for row in draw.with_trend(run, _positive(run, MEAN), "mean")]
    if not rows:
        return []
    scale = alt.Scale(type="log", base=2, nice=False)
    chart = draw.line_plot(runs, ("mean", "rollouts per prompt"), form="~r", scale=scale)
    hint = "log scale"
    if len(runs) == 1:
        rows += _extremes(runs[0])
        chart = draw.layered(_band(scale), chart)
        hint = "line: mean; band: fewest to most"
    return [Plot("rollouts-per-prompt", "Rollouts per prompt", chart, rows, hint=hint)]


def _positive(run: Run, name: str) -> dict[int, float]:
    return {step: value for step, value in run.history.series(name).items() if value > 0}


def _extremes(run: Run) -> list[Point]:
    fewest, most = draw.thinned(_positive(run, FEWEST)), draw.thinned(_positive(run, MOST))
    return [{"step": step, "fewest": low, "most": most[step]} for step, low in fewest.items() if step in most]


def _band(scale: alt.Scale) -> alt.Chart:
    return (
        alt.Chart(draw.data())
        .mark_area(opacity=0.13, color=run_colour(0))
        .encode(x=draw.step_axis(), y=alt.Y("fewest:Q", scale=scale), y2=alt.Y2("most:Q"))
        .transform_filter("isValid(datum.fewest)")
    )


def lengths(runs: Sequence[Run]) -> Section:
    """Plot both lengths and their ratio."""
    ratio = draw.trend_plot(
        runs,
        "length-ratio",
        "Kept over generated",
        ("ratio", "kept / generated length"),
        lambda run: run.history.series(RATIO),
        hint="below the dashed line, short answers are favoured",
        below=[draw.reference(1.0)],
    )
    return Section(
        "lengths",
        "Kept and generated length",
        "Mean tokens per answer. If the kept answers are shorter than the generated ones, short answers are favoured.",
        [*_lengths(runs), *ratio],
        draw.lacking(runs, lambda run: run.history.first_of(*GENERATED), "generated length")
        + draw.lacking(runs, lambda run: run.history.series(KEPT), "kept length"),
    )


def _lengths(runs: Sequence[Run]) -> list[Plot]:
    rows: list[Point] = []
    for run in runs:
        for kind, series in (("generated", run.history.first_of(*GENERATED)), ("kept", run.history.series(KEPT))):
            rows += [{**row, "of": kind} for row in draw.with_trend(run, series, "tokens")]
    if not rows:
        return []
    y = alt.Y("trend:Q", axis=draw.number_axis("tokens per answer"), scale=alt.Scale(zero=False))
    chart = draw.dashed_lines(runs, "of", {"kept": [1, 0], "generated": [4, 4]}, y, "tokens:Q")
    return [Plot("lengths", "Length", chart, rows, hint="solid: kept; dashed: generated")]


def bin_of(rate: float) -> str:
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
            plots.append(_over_time(number, "trained", draw.titled(runs, run, "Groups trained"), trained, BINS))
        if len(believed) > 1:
            title = draw.titled(runs, run, "Believed pass rates")
            plots.append(_over_time(number, "believed", title, believed, BELIEF_BINS))
    plots += _beliefs_now(runs)
    return Section(
        "pass-rates",
        "How hard the prompts were",
        "The share of prompts at each pass rate. A group at 0 or at 1 teaches nothing: every advantage in it is zero.",
        plots,
        draw.lacking(runs, lambda run: run.dumps, "pass rates of trained groups", "no answers in rollouts/")
        + draw.lacking(runs, lambda run: run.beliefs, "believed pass rates", "no beliefs in checkpoints/"),
    )


def _histogram(rates: Sequence[float]) -> dict[str, float]:
    counts = dict.fromkeys(BINS, 0)
    for rate in rates:
        counts[bin_of(rate)] += 1
    return {name: count / max(len(rates), 1) for name, count in counts.items()}


def _over_time(number: int, kind: str, title: str, rates: Mapping[int, Sequence[float]], bins: Sequence[str]) -> Plot:
    rows: list[Point] = [
        {"from": step, "to": end, "bin": name, "share": draw.rounded(share), "groups": len(rates[step])}
        for step, end in draw.until_next(sorted(rates)).items()
        for name, share in _histogram(rates[step]).items()
        if share
    ]
    order = list(reversed(bins))
    axis = alt.Axis(title="pass rate", grid=False)
    chart = draw.heat_map(
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
                {"run": run.name, "rate": (place + 0.5) / 10, "share": draw.rounded(shares[name])}
                for place, name in enumerate(BELIEF_BINS)
            ]
    if not rows:
        return []
    base = alt.Chart(draw.data()).encode(
        x=alt.X("rate:Q", axis=draw.number_axis("believed pass rate", "~r"), scale=alt.Scale(domain=[0, 1])),
        y=alt.Y("share:Q", axis=draw.number_axis("share of prompts visited", "~%"), stack=None),
        color=draw.by_run(runs),
        tooltip=draw.tips("run:N", alt.Tooltip("rate:Q", title="pass rate"), alt.Tooltip("share:Q", format=".1%")),
    )
    chart = base.mark_line(interpolate="monotone", point=alt.OverlayMarkDef(size=30))
    return [Plot("beliefs", "Believed pass rates at the last checkpoint", chart, rows, wide=True)]
