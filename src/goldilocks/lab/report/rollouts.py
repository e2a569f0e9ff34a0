"""What was generated: difficulty, rollouts and informative groups of the prompts, lengths, and where every token went.

The accounts of tokens are running totals, so a step is the difference of two. Tokens leave the accounts ``open`` and
``carried`` when they are judged or trained. That is drawn below zero, so the bars of a step sum to what the step
generated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import altair as alt

from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section, account_colour, account_order, account_title, run_colour
from goldilocks.lab.report.run import Run
from goldilocks.runs.history import History, Series, at_or_before, increments
from goldilocks.types import Account

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
MOST_BARS = 60
LABELLED_SHARE = 0.06
ROW = 44
_ACCOUNT = re.compile(r"accounts/(?P<account>.+)_tokens")


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
        draw.with_values([_given(runs), informative]),
        draw.lacking(runs, lambda run: run.history.series(MEAN), "rollouts per prompt")
        + draw.lacking(runs, lambda run: run.history.series(INFORMATIVE), "informative groups"),
    )


def _given(runs: Sequence[Run]) -> Plot:
    """Plot rollouts per prompt on a log scale, since policies differ by factors; steps without a group are left out."""
    rows = [row for run in runs for row in draw.with_trend(run, _positive(run, MEAN), "mean")]
    scale = alt.Scale(type="log", base=2, nice=False)
    chart = draw.line_plot(runs, ("mean", "rollouts per prompt"), form="~r", scale=scale)
    hint = "log scale"
    if len(runs) == 1:
        fewest, most = (draw.thinned(_positive(runs[0], name)) for name in (FEWEST, MOST))
        rows += [{"step": step, "fewest": low, "most": most[step]} for step, low in fewest.items() if step in most]
        band = (
            alt.Chart(draw.data())
            .mark_area(opacity=0.13, color=run_colour(0))
            .encode(x=draw.step_axis(), y=alt.Y("fewest:Q", scale=scale), y2=alt.Y2("most:Q"))
            .transform_filter("isValid(datum.fewest)")
        )
        chart = draw.layered(band, chart)
        hint = "line: mean; band: fewest to most"
    return Plot("rollouts-per-prompt", "Rollouts per prompt", chart, rows, hint=hint)


def _positive(run: Run, name: str) -> dict[int, float]:
    return {step: value for step, value in run.history.series(name).items() if value > 0}


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
        draw.with_values([_lengths(runs), ratio]),
        draw.lacking(runs, lambda run: run.history.first_of(*GENERATED), "generated length")
        + draw.lacking(runs, lambda run: run.history.series(KEPT), "kept length"),
    )


def _lengths(runs: Sequence[Run]) -> Plot:
    rows: list[Point] = []
    for run in runs:
        for kind, series in (("generated", run.history.first_of(*GENERATED)), ("kept", run.history.series(KEPT))):
            rows += [{**row, "of": kind} for row in draw.with_trend(run, series, "tokens")]
    y = alt.Y("trend:Q", axis=draw.number_axis("tokens per answer"), scale=alt.Scale(zero=False))
    chart = draw.dashed_lines(runs, "of", {"kept": [1, 0], "generated": [4, 4]}, y, "tokens:Q")
    return Plot("lengths", "Length", chart, rows, hint="solid: kept; dashed: generated")


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
        plots.append(_over_time(number, "trained", draw.titled(runs, run, "Groups trained"), trained, BINS))
        if len(believed) > 1:
            title = draw.titled(runs, run, "Believed pass rates")
            plots.append(_over_time(number, "believed", title, believed, BELIEF_BINS))
    plots.append(_beliefs_now(runs))
    return Section(
        "pass-rates",
        "How hard the prompts were",
        "The share of prompts at each pass rate. A group at 0 or at 1 teaches nothing: every advantage in it is zero.",
        draw.with_values(plots),
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


def _beliefs_now(runs: Sequence[Run]) -> Plot:
    rows: list[Point] = []
    for run in filter(lambda run: run.beliefs, runs):
        shares = _histogram([row.pass_rate for row in run.beliefs[-1].rows])
        rows += [
            {"run": run.name, "rate": (place + 0.5) / 10, "share": draw.rounded(shares[name])}
            for place, name in enumerate(BELIEF_BINS)
        ]
    base = alt.Chart(draw.data()).encode(
        x=alt.X("rate:Q", axis=draw.number_axis("believed pass rate", "~r"), scale=alt.Scale(domain=[0, 1])),
        y=alt.Y("share:Q", axis=draw.number_axis("share of prompts visited", "~%"), stack=None),
        color=draw.by_run(runs),
        tooltip=draw.tips("run:N", alt.Tooltip("rate:Q", title="pass rate"), alt.Tooltip("share:Q", format=".1%")),
    )
    chart = base.mark_line(interpolate="monotone", point=alt.OverlayMarkDef(size=30))
    return Plot("beliefs", "Believed pass rates at the last checkpoint", chart, rows, wide=True)


def accounts(history: History) -> dict[str, Series]:
    """Return the running totals by account, divided by reason where there are reasons."""
    found = {match["account"]: name for name in history.names if (match := _ACCOUNT.fullmatch(name))}
    with_reasons = {account.partition("/")[0] for account in found if "/" in account}
    leaves = [account for account in found if account.partition("/")[0] in set(Account)]
    series = {account: history.series(found[account]) for account in leaves if account not in with_reasons}
    return {account: totals for account, totals in series.items() if any(totals.values())}


def tokens(runs: Sequence[Run]) -> Section:
    """Plot the shares of each run, and each run step by step."""
    by_run = {run.name: accounts(run.history) for run in runs}
    there = {name: totals for name, totals in by_run.items() if totals}
    used = account_order(list({account for totals in there.values() for account in totals}))
    plots = [_shares(there, used)] if there else []
    alone = len(runs) == 1
    for number, run in enumerate(runs):
        if run.name in there:
            title = "Step by step" if alone else run.name
            plots.append(_steps(number, title, alone, there[run.name]))
    return Section(
        "tokens",
        "Where every token went",
        "Below zero: tokens of earlier steps, judged or trained now. The bars of a step sum to what it generated.",
        plots,
        draw.lacking(runs, lambda run: by_run[run.name], "accounts/*_tokens"),
        [(account_title(account), account_colour(account)) for account in used],
    )


def _scale(used: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=[account_title(one) for one in used], range=[account_colour(one) for one in used])


def _shares(there: Mapping[str, Mapping[str, Series]], used: Sequence[str]) -> Plot:
    rows: list[Point] = []
    for name, totals in there.items():
        final = {account: list(totals[account].values())[-1] for account in used if account in totals}
        generated, start = sum(final.values()) or 1.0, 0.0
        for account, count in final.items():
            share = count / generated
            rows.append(
                {
                    "run": name,
                    "account": account_title(account),
                    "tokens": count,
                    "share": draw.rounded(share),
                    "from": draw.rounded(start),
                    "to": draw.rounded(start + share),
                    "middle": draw.rounded(start + share / 2),
                    "label": f"{share:.0%}" if share >= LABELLED_SHARE else "",
                }
            )
            start += share
    y = alt.Y("run:N", sort=list(there), axis=alt.Axis(title=None, labelLimit=110, grid=False))
    bars = (
        alt.Chart(draw.data())
        .mark_bar(height=24)
        .encode(
            x=alt.X(
                "from:Q", axis=draw.number_axis("share of all generated tokens", "~%"), scale=alt.Scale(domain=[0, 1])
            ),
            x2=alt.X2("to:Q"),
            y=y,
            color=alt.Color("account:N", scale=_scale(used)),
            tooltip=draw.tips(
                "run:N", "account:N", alt.Tooltip("tokens:Q", format=","), alt.Tooltip("share:Q", format=".1%")
            ),
        )
    )
    labels = (
        alt.Chart(draw.data())
        .mark_text(fontSize=11, fontWeight=600, fill="#16181c")
        .encode(x=alt.X("middle:Q"), y=y, text=alt.Text("label:N"))
    )
    chart, height = draw.layered(bars, labels), ROW * len(there)
    return Plot("tokens-by-account", "Over the whole run", chart, rows, height=height, wide=True)


def _steps(number: int, title: str, wide: bool, totals: Mapping[str, Series]) -> Plot:
    order = account_order(list(totals))
    steps = sorted({step for series in totals.values() for step in series})
    size = -(-len(steps) // MOST_BARS) or 1  # of a stretch; the last may be shorter
    stretches = [steps[start : start + size] for start in range(0, len(steps), size)]
    edges = [(stretch[0], stretch[-1]) for stretch in stretches]
    sampled = {
        account: increments({edge: at_or_before(totals[account], edge) or 0.0 for _, edge in edges})
        for account in order
    }
    rows = [row for start, end in edges for row in _stack(start, end, {one: sampled[one][end] for one in order})]
    chart = (
        alt.Chart(draw.data())
        .mark_rect()
        .encode(
            x=draw.step_axis("from"),
            x2=alt.X2("to:Q"),
            y=alt.Y("low:Q", axis=draw.number_axis("tokens per step")),
            y2=alt.Y2("high:Q"),
            color=alt.Color("account:N", scale=_scale(order)),
            tooltip=draw.tips("account:N", "steps:N", alt.Tooltip("tokens:Q", format=",", title="tokens per step")),
        )
    )
    return Plot(f"tokens-by-step-{number + 1}", title, chart, rows, wide=wide)


def _stack(start: int, end: int, counts: Mapping[str, float]) -> list[Point]:
    """Return one bar: gains of an account above zero, losses below."""
    width = end - start + 1
    tops = {True: 0.0, False: 0.0}
    rows: list[Point] = []
    for account, count in counts.items():
        a_step, up = count / width, count > 0
        if not count:
            continue
        rows.append(
            {
                "account": account_title(account),
                "from": start - 0.44,
                "to": end + 0.44,
                "low": draw.rounded(tops[up]),
                "high": draw.rounded(tops[up] + a_step),
                "tokens": draw.rounded(a_step),
                "steps": str(start) if start == end else f"{start}–{end}",
            }
        )
        tops[up] += a_step
    return rows
