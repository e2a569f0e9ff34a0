"""What the sections of the page are made of: plots of a few kinds, axes, colours, fonts, and notes of what is missing.

A section shows what its runs have. A plot without data is left out, and a note says what is missing. A run, and an
account, has the same colour everywhere. Trained tokens are honey-coloured, too hard is red, too easy is blue, and the
rest is muted. Vega is one script, so that the page needs no network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import altair as alt
import vl_convert

from goldilocks import __version__
from goldilocks.lab.report.run import Run
from goldilocks.runs.files import cache_folder, write_text
from goldilocks.runs.history import Series
from goldilocks.sheet import Sheet

HEIGHT = 240
MOST_POINTS = 240  # per line; more cannot be distinguished at the width of a page
TREND = 0.05  # the share of a run, to either side, that a point of its trend is the mean of
VALUES = "values"

Point = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """A plot. ``name`` is the file name of its PNG; ``hint`` says in a few words how to read it."""

    name: str
    title: str
    chart: alt.Chart | alt.LayerChart
    values: Sequence[Point]
    hint: str = ""
    height: int = HEIGHT
    wide: bool = False

    def spec(self) -> dict[str, Any]:
        """Return the Vega-Lite spec with its data. Validation would double the time; the tests draw every plot."""
        spec = self.chart.properties(width="container", height=self.height).to_dict(validate=False)
        spec.pop("$schema")
        spec.pop("config")  # Altair's default; ours depends on the theme
        return {**spec, "datasets": {**spec.get("datasets", {}), VALUES: list(self.values)}}


@dataclass(frozen=True)
class Section:
    """A heading, what it shows in a sentence, its tables and plots, and a line for everything that is missing.

    ``legend``: names and colours, where the colours of its plots are not the runs'.
    """

    name: str
    title: str
    lead: str
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    legend: Sequence[tuple[str, str]] = ()
    columns: int = 2
    sheets: Sequence[Sheet] = ()


def with_values(plots: Iterable[Plot]) -> list[Plot]:
    """Return the plots that have something to show."""
    return [plot for plot in plots if plot.values]


def data() -> alt.NamedData:
    return alt.NamedData(name=VALUES)


def by_run(runs: Sequence[Run]) -> alt.Color:
    """Return the colour encoding of the runs, the same in every plot."""
    names = [run.name for run in runs]
    scale = alt.Scale(domain=names, range=[run_colour(number) for number in range(len(names))])
    return alt.Color("run:N", scale=scale) if len(runs) > 1 else alt.Color("run:N", scale=scale, legend=None)


def number_axis(title: str | None, form: str = "~s") -> alt.Axis:
    """Return an axis of numbers, with SI prefixes for large ones."""
    return alt.Axis(title=title, format=form, labelExpr="datum.value === 0 ? '0' : datum.label")


def step_axis(field: str = "step") -> alt.X:
    """Return an axis of steps, which are whole numbers."""
    axis = alt.Axis(title="step", format="d", tickMinStep=1)
    return alt.X(field, type="quantitative", axis=axis, scale=alt.Scale(nice=False, zero=False))


def tips(*fields: str | alt.Tooltip) -> list[alt.Tooltip]:
    """Return what is shown of a point. Altair takes words as well, but asks all of its 500 classes for each one."""
    return [alt.Tooltip(one) if isinstance(one, str) else one for one in fields]


def line_plot(
    runs: Sequence[Run], y: tuple[str, str], *, x: alt.X | None = None, form: str = "~s", scale: alt.Scale | None = None
) -> alt.LayerChart:
    """Return a plot with a line per run, by step unless ``x`` is given; ``y`` is a field and its title.

    The line is the field ``trend`` of the rows (``with_trend``); the field ``y`` itself is drawn faintly behind it.
    """
    base = alt.Chart(data()).encode(x=x or step_axis(), color=by_run(runs))

    def at(field: str) -> alt.Y:
        return alt.Y(field, type="quantitative", axis=number_axis(y[1], form), scale=scale or alt.Scale(zero=False))

    shown = tips("run:N", "step:Q", alt.Tooltip(y[0], type="quantitative", title=y[1]))
    return layered(
        base.mark_line(strokeWidth=1, opacity=0.35, point=False).encode(y=at(y[0])),
        base.mark_line().encode(y=at("trend")),
        base.mark_circle(size=140, opacity=0).encode(y=at(y[0]), tooltip=shown),
    )


def dashed_lines(
    runs: Sequence[Run], kind: str, dashes: Mapping[str, list[int]], y: alt.Y, value: str | alt.Tooltip
) -> alt.Chart:
    """Return a line per run and value of the field ``kind``, which ``dashes`` tell apart."""
    dash = alt.StrokeDash(kind, type="nominal", scale=alt.Scale(domain=list(dashes), range=list(dashes.values())))
    shown = tips("run:N", f"{kind}:N", "step:Q", value)
    return alt.Chart(data()).mark_line().encode(x=step_axis(), y=y, color=by_run(runs), strokeDash=dash, tooltip=shown)


def heat_map(
    number: int, axis: str, order: Sequence[str], what: str, darkness: alt.Scale, *more: alt.Tooltip
) -> alt.Chart:
    """Return cells from the step ``from`` to the step ``to`` in the colour of a run; ``share`` makes them dark.

    ``order`` has the values of the field ``row`` from the top, ``axis`` is what they are values of, ``what`` the share.
    """
    shown = [
        alt.Tooltip("from:Q", title="step"),
        alt.Tooltip("row:N", title=axis),
        alt.Tooltip("share:Q", format=".1%", title=what),
    ]
    y = alt.Y("row:O", sort=order, axis=alt.Axis(title=axis, grid=False), scale=alt.Scale(domain=order))
    opacity = alt.Opacity("share:Q", scale=darkness, legend=None)
    cells = alt.Chart(data()).mark_rect(fill=run_colour(number), stroke=None)
    return cells.encode(x=step_axis("from"), x2=alt.X2("to:Q"), y=y, opacity=opacity, tooltip=[*shown, *more])


def until_next(steps: Sequence[int]) -> dict[int, int]:
    """Return for each step the next one; the last is as long as the one before it."""
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1
    return dict(zip(steps, [*steps[1:], *(step + width for step in steps[-1:])], strict=True))


def with_trend(run: Run, series: Series, field: str) -> list[Point]:
    """Return a row per step, thinned, with the value and its trend."""
    values = thinned(series)
    trend = smoothed(values)
    return [
        {"run": run.name, "step": step, field: rounded(value), "trend": rounded(trend[step])}
        for step, value in values.items()
    ]


def layered(*charts: alt.Chart | alt.LayerChart) -> alt.LayerChart:
    """Return the charts as layers, the last on top.

    Altair's constructor copies every chart three times, to move up what the layers have in common.
    """
    chart = alt.LayerChart()
    chart.layer = list(charts)
    return chart


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """Return at most ``most`` points: the mean of each stretch of steps, at its last step."""
    steps, values = list(series), list(series.values())
    size = -(-len(steps) // most) or 1
    stretches = [slice(start, start + size) for start in range(0, len(steps), size)]
    return {steps[part][-1]: sum(values[part]) / len(values[part]) for part in stretches}


def smoothed(series: Series) -> Series:
    """Return the centred moving mean over a share of the run."""
    values, reach = list(series.values()), int(len(series) * TREND)
    windows = (values[max(0, place - reach) : place + reach + 1] for place in range(len(values)))
    return {step: sum(window) / len(window) for step, window in zip(series, windows, strict=True)}


def rounded(value: float) -> float:
    """Round to eight digits: GSPO's ratios differ from 1 in the fourth or fifth."""
    return float(f"{value:.8g}")


def titled(runs: Sequence[Run], run: Run, title: str) -> str:
    """Return the title of a plot of one run, with the run's name if there are others."""
    return title if len(runs) == 1 else f"{run.name}: {title[0].lower()}{title[1:]}"


def lacking(runs: Sequence[Run], there: Callable[[Run], object], what: str) -> list[str]:
    """Return a note that names the runs that logged none of something; none is named where all lack it."""
    names = [run.name for run in runs if not there(run)]
    by = "" if len(runs) == len(names) else f" by {', '.join(names)}"
    return [f"{what}: not logged{by}"] if names else []


# -- colours, fonts and Vega -------------------------------------------------------------------------------------------

RUN_COLOURS = (
    "#4f7be0", "#e8890c", "#2a9d6f", "#d1495b", "#8e63ce", "#1ba3b8", "#c45ba0", "#8c6d4f", "#7a8794", "#a3a61c",
)  # fmt: skip

ACCOUNT_COLOURS = {
    "trained": "#e3a617",
    "trimmed": "#f0cd7a",
    "backfilled": "#b9a06a",
    "filtered/too_easy": "#5aa5d6",
    "filtered/above_band": "#8cc3e6",
    "filtered/too_hard": "#d8574b",
    "filtered/below_band": "#ec9489",
    "filtered/overlong": "#a56cc1",
    "filtered": "#c77f5a",
    "expired": "#7d6b5d",
    "cancelled": "#9aa1ab",
    "rejected": "#c45ba0",
    "failed": "#5f6773",
    "paused": "#b3a5d6",
    "duplicate": "#c3c8cf",
    "carried": "#8fbf9f",
    "open": "#c5dccb",
}

FONT = 'Inter, "Helvetica Neue", "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Arial, sans-serif'


def run_colour(number: int) -> str:
    """Return the colour of a run by its place on the command line."""
    return RUN_COLOURS[number % len(RUN_COLOURS)]


def account_colour(account: str) -> str:
    """Return the colour of an account, or of its class if the reason is not known here."""
    return ACCOUNT_COLOURS.get(account) or ACCOUNT_COLOURS.get(account.partition("/")[0], "#9aa1ab")


def account_order(accounts: Sequence[str]) -> list[str]:
    """Sort accounts as the colours are listed; an unknown reason stands with its class."""
    known = list(ACCOUNT_COLOURS)

    def place(account: str) -> tuple[int, str]:
        name = account if account in ACCOUNT_COLOURS else account.partition("/")[0]
        return (known.index(name) if name in ACCOUNT_COLOURS else len(known), account)

    return sorted(accounts, key=place)


def account_title(account: str) -> str:
    """Return ``filtered/too_hard`` as ``filtered: too hard``."""
    return account.replace("/", ": ").replace("_", " ")


def vega_config(ink: str, faint: str, grid: str) -> dict[str, Any]:
    """Return Vega-Lite's config: no frame, few ticks, a faint grid."""
    axis = {
        "labelColor": faint,
        "titleColor": faint,
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 11,
        "titlePadding": 10,
        "labelPadding": 6,
        "gridColor": grid,
        "domain": False,
        "ticks": False,
        "tickCount": 5,
    }
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": axis,
        "axisX": {"labelFlush": True, "grid": False, "domain": True, "domainColor": grid},
        "legend": {"labelColor": ink, "orient": "top", "title": None, "symbolType": "circle", "symbolOpacity": 1},
        "title": {"color": ink, "subtitleColor": faint, "anchor": "start", "fontSize": 14, "offset": 14},
        "text": {"fill": ink},
        "rule": {"color": faint},
        # points are hidden by the line, except in a run of one step
        "line": {"strokeWidth": 2, "strokeCap": "round", "strokeJoin": "round", "point": {"size": 5}},
    }


LIGHT = vega_config(ink="#22252a", faint="#6a707a", grid="#e8e6e0")
DARK = vega_config(ink="#e9e6df", faint="#9a9ea6", grid="#33363c")


def vega_script() -> str:
    """Return the script that defines ``vegaEmbed``. It takes seconds to make, so it is kept in the user's cache."""
    file = cache_folder() / f"vega-{version('vl-convert-python')}-{__version__}.js"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the next report a few seconds
        write_text(file, script)
    return script
