"""``goldilocks report``: runs as one HTML page without external files, with PNGs beside it.

Text of models and data sets is never markup: the template escapes it, the table inserts it as text nodes, and the
embedded JSON contains no ``<`` that could end the script. The page's content security policy allows only its two
scripts, by their hashes, and no connections.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from html import escape
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from goldilocks.errors import require
from goldilocks.lab.report.draw import DARK, LIGHT, Plot, Section, run_colour, vega_script
from goldilocks.lab.report.learning import by_column, learning, ratios, reward, validation_metrics
from goldilocks.lab.report.rollouts import INFORMATIVE, accounts, lengths, pass_rates, rollouts, tokens
from goldilocks.lab.report.run import Run, read_runs
from goldilocks.runs.costs import clock
from goldilocks.runs.history import validated_source
from goldilocks.runs.records import GROUPS_WITH_ANSWERS, evenly

SECTIONS = (learning, by_column, tokens, pass_rates, rollouts, lengths, ratios)  # in the order of the page
MOST_PROMPTS = 5000
LONGEST_PROMPT = 600  # characters of a prompt in the table
LONGEST_ANSWER = 4000
ABSENT = "–"
_percent, _share, _tenths, _count = "{:.1%}".format, "{:.3f}".format, "{:.1f}".format, "{:,.0f}".format
GENERATED = "adaptive_rollout/total_rollouts"
WIDTH, WIDE = 560, 900
FRAME = 720  # pixels of a page in a notebook
EPILOG = """\
examples:
  goldilocks report runs/tiny                      runs/tiny/report.html, PNGs in runs/tiny/report/
  goldilocks report runs/a runs/b --out ab.html    both, one over the other
"""


@dataclass(frozen=True)
class Page:
    """The page, its plots, and a line for everything that is missing."""

    html: str
    plots: tuple[Plot, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Opening:
    """What a page shows before its runs, which are folded: the study that they are arms of.

    ``names`` are what is compared, each with its colour; ``arms`` is the title of the folded part.
    """

    title: str
    lead: str
    names: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    arms: str


def make_page(runs: Sequence[Run], *, opening: Opening | None = None) -> Page:
    made = (make(runs) for make in SECTIONS)
    sections = [section for section in made if section.plots or section.sheets or section.notes]
    plots = tuple(plot for section in (*(opening.sections if opening else ()), *sections) for plot in section.plots)
    prompts, prompt_note = _prompts(runs)
    lines = dict.fromkeys(line for run in runs for line in run.missing)
    lacking = {line: [run.name for run in runs if line in run.missing] for line in lines}
    absent = {line: "" if len(names) == len(runs) else ", ".join(names) for line, names in lacking.items()}
    named = [{"name": run.name, "colour": run_colour(number)} for number, run in enumerate(runs)]
    html = _environment().get_template("page.html").render(
        title=opening.title if opening else " · ".join(run.name for run in runs),
        opening=opening,
        runs=named,
        figures=figures(runs),
        absent=absent,
        sections=sections,
        prompts=prompts,
        prompt_note=prompt_note,
        answers=[_answers(run) for run in runs],
        clip=_clip,
        made=datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        data=_json({
            "plots": {plot.name: plot.spec() for plot in plots},
            "config": {"light": LIGHT, "dark": DARK},
            "runs": named,
            "prompts": prompts,
        }),
        **_assets(),
    )  # fmt: skip
    of_runs = [f"{names}: {line}" if names else line for line, names in absent.items()]
    return Page(html, plots, (*of_runs, *(note for section in sections for note in section.notes)))


def _prompts(runs: Sequence[Run]) -> tuple[list[list[Any]], str]:
    """Return the rows of the table, the most visited prompts of each run, and a note if some are left out."""
    rows: list[list[Any]] = []
    total = 0
    for number, run in enumerate(runs):
        beliefs = run.beliefs[-1].rows if run.beliefs else ()
        total += len(beliefs)
        for one in beliefs[: MOST_PROMPTS // len(runs)]:
            text = run.texts.get(one.key)
            shown = f"#{one.key:016x}" if text is None else _clip(text, LONGEST_PROMPT)
            rate, spread, tokens = round(one.pass_rate, 3), round(one.spread, 3), round(one.tokens)
            rows.append([number, shown, rate, spread, one.visits, one.streak, tokens])
    return rows, f"the {len(rows):,} most visited of {total:,} prompts" if len(rows) < total else ""


def _answers(run: Run) -> list[dict[str, Any]]:
    """Return a few groups of the first and the last dumped step, to compare early and late answers."""
    ends = evenly(run.dumps, 2)
    share = GROUPS_WITH_ANSWERS // max(len(ends), 1)
    return [{"step": dump.step, "groups": evenly(dump.groups, share)} for dump in ends]


def _clip(text: str, longest: int = LONGEST_ANSWER) -> str:
    return text if len(text) <= longest else text[:longest] + f" … ({len(text) - longest:,} more characters)"


def _json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    loader, strict = jinja2.PackageLoader("goldilocks.lab.report"), jinja2.StrictUndefined
    return jinja2.Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)


@lru_cache(maxsize=1)
def _assets() -> dict[str, Markup]:
    """Return the page's style and scripts, and the content security policy that allows only these."""
    folder = resources.files("goldilocks.lab.report") / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    vega = vega_script()
    hashes = [hashlib.sha256(text.encode("utf-8")).digest() for text in (vega, script)]
    allowed = " ".join(f"'sha256-{base64.b64encode(one).decode('ascii')}'" for one in hashes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    return {"style": Markup(style), "script": Markup(script), "vega": Markup(vega), "policy": Markup(policy)}


@dataclass(frozen=True)
class Figure:
    """One column: a heading, its meaning, and a value for each run. ``best`` marks the highest values."""

    title: str
    about: str
    values: Sequence[str]
    best: Sequence[bool]


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the columns; one without any value is left out."""
    columns = [
        *(column for metric in validation_metrics(runs) for column in _accuracy(runs, metric)),
        _figure("mean reward", "last tenth of the run", runs, _late_reward, _share),
        _figure("updates", "of the policy", runs, lambda run: len(reward(run.history)) or None, _count, ranked=False),
        _figure("rollouts", "all generated", runs, lambda run: run.spending.total("rollouts"), _count, ranked=False),
        _figure("tokens", "all generated", runs, lambda run: run.spending.total("tokens"), _large, ranked=False),
        _figure("wall-clock", "all steps", runs, lambda run: run.spending.total("seconds"), clock, ranked=False),
        _figure("tokens trained", "of all tokens", runs, _trained_share, _percent),
        _figure("informative groups", "per 1,000 rollouts", runs, _informative, _tenths),
    ]
    return [column for column in columns if any(value != ABSENT for value in column.values)]


def _accuracy(runs: Sequence[Run], metric: str) -> list[Figure]:
    about = f"on {validated_source(metric)}, at the end"
    final = _figure("accuracy", about, runs, lambda run: run.history.last(metric), _percent)
    spent = [run.spending.total("rollouts") for run in runs if run.history.series(metric)]
    known = [total for total in spent if total is not None]
    if len(runs) == 1 or len(known) < len(runs):
        return [final]
    budget = min(known)

    def within(run: Run) -> float | None:
        """Return the last validation within the budget."""
        validations = run.history.series(metric).items()
        paid = [value for step, value in validations if (run.spending.until("rollouts", step) or 0.0) <= budget]
        return paid[-1] if paid else None

    return [final, _figure("at equal rollouts", f"after {_large(budget)} each", runs, within, _percent)]


def _figure(
    title: str,
    about: str,
    runs: Sequence[Run],
    read: Callable[[Run], float | None],
    show: Callable[[float], str],
    *,
    ranked: bool = True,
) -> Figure:
    values = [read(run) for run in runs]
    known = [value for value in values if value is not None]
    compared = ranked and len(known) > 1
    best = [compared and value is not None and show(value) == show(max(known)) for value in values]
    return Figure(title, about, [ABSENT if value is None else show(value) for value in values], best)


def _late_reward(run: Run) -> float | None:
    values = list(reward(run.history).values())
    return fmean(values[-max(len(values) // 10, 1) :]) if values else None


def _trained_share(run: Run) -> float | None:
    totals = {account: list(series.values())[-1] for account, series in accounts(run.history).items()}
    generated = sum(totals.values())
    return totals.get("trained", 0.0) / generated if generated else None


def _informative(run: Run) -> float | None:
    rates, made = run.history.series(INFORMATIVE), run.history.series(GENERATED)
    weight = sum(made.get(step, 0.0) for step in rates)
    return sum(rate * made.get(step, 0.0) for step, rate in rates.items()) / weight if weight else None


def _large(value: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.0f}"


@dataclass(frozen=True)
class Written:
    """The files of a report, and what it could not show."""

    page: Path
    pngs: tuple[Path, ...]
    missing: tuple[str, ...]

    def _repr_html_(self) -> str:
        """Show the page in a notebook, which finds it beside itself or below (``examples/tour.ipynb``)."""
        page = escape(Path(os.path.relpath(self.page)).as_posix())
        frame = f'<iframe src="{page}" width="100%" height="{FRAME}" style="border: 0"></iframe>'
        return f'{frame}<p><a href="{page}">{page}</a></p>'


def write_report(paths: Sequence[Path], out: Path, *, png: bool = True, opening: Opening | None = None) -> Written:
    """Write the report of these run directories to ``out``, and PNGs to the folder of that name without ``.html``."""
    require(out.suffix == ".html", "--out", str(out), "a file name that ends in .html")
    page = make_page(read_runs(paths), opening=opening)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page.html, encoding="utf-8", newline="\n")
    return Written(out, tuple(write_png(plot, out.with_suffix("")) for plot in page.plots) if png else (), page.missing)


def write_png(plot: Plot, folder: Path) -> Path:
    """Write one plot as a PNG with its title, on white and at twice the resolution, for use on a slide."""
    folder.mkdir(parents=True, exist_ok=True)
    title = {"text": plot.title, "subtitle": plot.hint} if plot.hint else plot.title
    spec = {**plot.spec(), "width": WIDE if plot.wide else WIDTH, "title": title, "padding": 16}
    config = {**LIGHT, "background": "white"}
    file = folder / f"{plot.name}.png"
    file.write_bytes(vl_convert.vegalite_to_png(spec, scale=2, config=config, allowed_base_urls=[]))
    return file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="a run directory, as goldilocks train makes it")
    add("--out", metavar="FILE", type=Path, help="the page (default: RUN/report.html, or report.html for several runs)")
    add("--no-png", action="store_true", help="write the page alone")


def run(args: argparse.Namespace) -> int:
    out = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html"))
    written = write_report(args.runs, out, png=not args.no_png)
    print(f"page     {written.page} ({written.page.stat().st_size / 1e6:.1f} MB)")
    if written.pngs:
        print(f"plots    {written.pngs[0].parent}/ ({len(written.pngs)} PNGs)")
    for line in written.missing:
        print(f"missing  {line}")
    return 0
