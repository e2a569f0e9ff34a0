"""Where every generated token went: the accounts, over the whole run and step by step.

The accounts are running totals, so a step is the difference of two. Tokens leave the accounts ``open`` and ``carried``
when they are judged or trained. That is drawn below zero, so the bars of a step sum to what the step generated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import altair as alt

from goldilocks.lab.report import draw
from goldilocks.lab.report.draw import Plot, Point, Section, account_colour, account_order, account_title
from goldilocks.lab.report.run import Run
from goldilocks.runs.history import History, Series, at_or_before, increments
from goldilocks.types import Account

MOST_BARS = 60
LABELLED_SHARE = 0.06
ROW = 44
_ACCOUNT = re.compile(r"accounts/(?P<account>.+)_tokens")


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
    edges = _edges(sorted({step for series in totals.values() for step in series}))
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


def _edges(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return stretches of steps as pairs of first and last; all but the last have the same length."""
    size = -(-len(steps) // MOST_BARS) or 1
    return [(steps[start], steps[min(start + size, len(steps)) - 1]) for start in range(0, len(steps), size)]


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
