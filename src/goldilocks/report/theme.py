"""Colours and fonts of the page and the PNGs, and Vega as one script, so that the page needs no network.

A run, and an account, has the same colour everywhere. Trained tokens are honey-coloured, too hard is red, too easy is
blue, and the rest is muted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import vl_convert

from goldilocks import __version__
from goldilocks.runs.files import cache_folder, write_text

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
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, script)
    return script
