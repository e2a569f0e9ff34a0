"""What was generated: difficulty, rollouts and informative groups of the prompts, lengths, and where every token went.

The accounts of tokens are running totals, so a step is the difference of two. Tokens leave the accounts ``open`` and
``carried`` when they are judged or trained. That is drawn below zero, so the bars of a step sum to what the step
generated.
"""

from __future__ import annotations

import re
from collections import Counter
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

# 0 and 1 have bins of their own: such groups teach nothing
BELIEF_BINS = tuple(f"{low / 10:.1f}–{(low + 1) / 10:.1f}" for low in range(10))  # a posterior mean is never 0 or 1
BINS = ("0", *BELIEF_BINS, "1")
MOST_BARS = 60
LABELLED_SHARE = 0.06
ROW = 44
_ACCOUNT = re.compile(r"accounts/(?P<account>.+)_tokens")


def rollouts(runs: Sequence[Run]) -> Section:
    """Plot rollouts per prompt and informative groups per 1,000 rollouts."""
    rows = [row for run in runs for row in draw.with_trend(run, run.history.series(INFORMATIVE), "groups")]
    chart = draw.line_plot(runs, ("groups", "groups per 1,000 rollouts"), form="~r", scale=alt.Scale(zero=True))
    informative = Plot("informative-groups", "Informative groups", chart, rows, hint="groups whose rewards differ")
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
    """Plot the mean length of the kept and of all generated answers."""
    rows: list[Point] = []
    for run in runs:
        for kind, series in (("generated", run.history.first_of(*GENERATED)), ("kept", run.history.series(KEPT))):
            rows += [{**row, "of": kind} for row in draw.with_trend(run, series, "tokens")]
    y = alt.Y("trend:Q", axis=draw.number_axis("tokens per answer"), scale=alt.Scale(zero=False))
    chart = draw.dashed_lines(runs, "of", {"kept": [1, 0], "generated": [4, 4]}, y, "tokens:Q")
    return Section(
        "lengths",
        "Kept and generated length",
        "Mean tokens per answer. If the kept answers are shorter than the generated ones, short answers are favoured.",
        draw.with_values([Plot("lengths", "Length", chart, rows, hint="solid: kept; dashed: generated", wide=True)]),
        draw.lacking(runs, lambda run: run.history.first_of(*GENERATED), "generated length")
        + draw.lacking(runs, lambda run: run.history.series(KEPT), "kept length"),
    )


def bin_of(rate: float) -> str:
    if rate <= 0:
        return BINS[0]
    return BINS[-1] if rate >= 1 else BINS[1 + min(int(rate * 10), 9)]


def pass_rates(runs: Sequence[Run]) -> Section:
    """Plot two heat maps per run: of its trained groups, and of what was believed of the prompts."""
    plots: list[Plot] = []
    for number, run in enumerate(runs):
        trained = {dump.step: [group.pass_rate for group in dump.groups] for dump in run.dumps}
        believed = {one.step: [row.pass_rate for row in one.rows] for one in run.beliefs}
        plots += [
            _over_time(number, "trained", draw.titled(runs, run, "Groups trained"), trained, BINS),
            _over_time(number, "believed", draw.titled(runs, run, "Believed pass rates"), believed, BELIEF_BINS),
        ]
    return Section(
        "pass-rates",
        "How hard the prompts were",
        "The share of prompts at each pass rate. A group at 0 or at 1 teaches nothing: every advantage in it is zero.",
        draw.with_values(plots),  # a run without answers or beliefs says so itself
    )


def _over_time(number: int, kind: str, title: str, rates: Mapping[int, Sequence[float]], bins: Sequence[str]) -> Plot:
    rows: list[Point] = [
        {"from": step, "to": end, "row": name, "share": draw.rounded(count / len(rates[step])), "of": len(rates[step])}
        for step, end in draw.until_next(sorted(rates)).items()
        for name, count in Counter(map(bin_of, rates[step])).items()
    ]
    darkness = alt.Scale(range=[0.06, 1], type="sqrt")
    chart = draw.heat_map(number, "pass rate", bins[::-1], "share", darkness, alt.Tooltip("of:Q"))
    return Plot(f"pass-rates-{kind}-{number + 1}", title, chart, rows, hint="darker: a larger share")


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
            plots.append(_steps(number, "Step by step" if alone else run.name, alone, there[run.name]))
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
        generated = sum(final.values()) or 1.0
        for account, count in final.items():
            share = count / generated
            row = {"run": name, "account": account_title(account), "tokens": count, "share": draw.rounded(share)}
            rows.append({**row, "label": f"{share:.0%}" if share >= LABELLED_SHARE else ""})
    y = alt.Y("run:N", sort=list(there), axis=alt.Axis(title=None, labelLimit=110, grid=False))
    base = alt.Chart(draw.data()).transform_stack(stack="share", as_=["from", "to"], groupby=["run"]).encode(y=y)
    axis = draw.number_axis("share of all generated tokens", "~%")
    of_run = alt.Tooltip("share:Q", format=".1%")
    bars = base.mark_bar(height=24).encode(
        x=alt.X("from:Q", axis=axis, scale=alt.Scale(domain=[0, 1])),
        x2=alt.X2("to:Q"),
        color=alt.Color("account:N", scale=_scale(used)),
        tooltip=draw.tips("run:N", "account:N", alt.Tooltip("tokens:Q", format=","), of_run),
    )
    middle = base.transform_calculate(middle="(datum.from + datum.to) / 2")
    labels = middle.mark_text(fontSize=11, fontWeight=600, fill="#16181c").encode(x="middle:Q", text="label:N")
    chart, height = draw.layered(bars, labels), ROW * len(there)
    return Plot("tokens-by-account", "Over the whole run", chart, rows, height=height, wide=True)


def _steps(number: int, title: str, wide: bool, totals: Mapping[str, Series]) -> Plot:
    """Plot what each step added to each account; several steps are one bar where there are many."""
    order = account_order(list(totals))
    steps = sorted({step for series in totals.values() for step in series})
    size = -(-len(steps) // MOST_BARS) or 1  # of a stretch; the last may be shorter
    stretches = [steps[start : start + size] for start in range(0, len(steps), size)]
    edges = [(stretch[0], stretch[-1]) for stretch in stretches]
    added = {
        account: increments({edge: at_or_before(totals[account], edge) or 0.0 for _, edge in edges})
        for account in order
    }
    rows: list[Point] = [
        {
            "account": account_title(account),
            "from": start - 0.44,
            "to": end + 0.44,
            "tokens": draw.rounded(added[account][end] / (end - start + 1)),
            "steps": str(start) if start == end else f"{start}–{end}",
        }
        for start, end in edges
        for account in order
        if added[account][end]
    ]
    chart = (
        alt.Chart(draw.data())
        .transform_stack(stack="tokens", as_=["low", "high"], groupby=["from"])
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
