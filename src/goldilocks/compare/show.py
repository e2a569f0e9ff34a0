"""The table for people: on a terminal and in Markdown, from the same cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table as RichTable

from goldilocks.compare.grid import Values
from goldilocks.compare.interval import Interval
from goldilocks.compare.table import SHARES, RecipeRow, Spent, Table
from goldilocks.recipes import name_of
from goldilocks.runs.progress import clock

Cell = Callable[[RecipeRow], str]

LEGEND = """\
accuracy: at the equal cost, mean ± 95% t-interval over the seeds; against baseline: the difference seed by seed, in
points; at ⅔: accuracy at two thirds of the cost minus the baseline's at the full cost, seed by seed; to baseline: the
cost at which the mean curve reaches the baseline's accuracy; groups: trained groups whose rewards differ; signal:
Σ(r − r̄)² over the trained rollouts; both per rollout or token generated. time: wall-clock of an arm, with its start
and its validations."""


def columns(table: Table) -> dict[str, Cell]:
    """Return a cell for every heading; a line break in a heading makes its column narrower."""
    kind = table.cost.kind
    return {
        "recipe": lambda row: name_of(row.recipe),
        "accuracy": lambda row: _percent(row.accuracy),
        "against\nbaseline": lambda row: _points(row.against_baseline),
        f"at ⅔ of the\n{kind}": lambda row: _points(row.at_two_thirds),
        f"{kind}\nto baseline": lambda row: _reached(row.cost_to_baseline, kind),
        "updates": lambda row: _mean(row.updates, 0),
        "groups per\n1k rollouts": lambda row: _spread(row.informative_groups_per_1k_rollouts),
        "signal per\n1k rollouts": lambda row: _spread(row.signal_per_1k_rollouts),
        "groups per\n1M tokens": lambda row: _spread(row.informative_groups_per_1m_tokens),
        "signal per\n1M tokens": lambda row: _spread(row.signal_per_1m_tokens),
        "rollouts": lambda row: _mean(row.rollouts, 0),
        "tokens": lambda row: _mean(row.tokens, 0),
        "time": lambda row: clock(60 * row.wall_minutes.mean),
    }


def caption(table: Table) -> str:
    """Return the line above the table: the cost, the seeds, and the accuracy before training."""
    seeds = table.rows[0].seeds
    over = "1 seed" if seeds == 1 else f"{seeds} seeds"
    return f"at {table.cost} each, {over}; {100 * table.start:.1f}% before training"


def notes(table: Table) -> list[str]:
    """The differences seed by seed, what tuning tried and chose, and what everything cost."""
    lines = [_by_seed(row, table.rows[0]) for row in table.rows if len(row.differences) > 1]
    lines += [line for row in table.rows if len(row.differences) > 1 for line in _along(row, table)]
    lines.append(_cost("the arms of the table", table.reported))
    if table.trials:
        seeds = table.tuning.arms // len(table.trials)
        lines.append(_cost(f"tuning before it, {'one seed' if seeds == 1 else f'{seeds} seeds'}", table.tuning))
        for row in table.rows:
            own = [trial for trial in table.trials if trial.recipe == row.recipe]
            tried = ", ".join(f"{100 * trial.accuracy:.1f}%" for trial in own)
            lines.append(f"{name_of(row.recipe)}: {settings(row.settings)} (tried: {tried})")
    return lines


def _by_seed(row: RecipeRow, baseline: RecipeRow) -> str:
    points = ", ".join(f"{100 * difference:+.1f}" for difference in row.differences)
    return f"{name_of(row.recipe)} against {name_of(baseline.recipe)}, seed by seed: {points} points"


def _along(row: RecipeRow, table: Table) -> list[str]:
    name, baseline, kind = name_of(row.recipe), name_of(table.rows[0].recipe), table.cost.kind
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    return [
        f"{name} against {baseline} at {shares} of the {kind}: {', '.join(map(_points, row.along))}",
        f"{name} at ⅔ of each less {baseline} at all of it: {', '.join(map(_points, row.two_thirds_along))}",
    ]


def settings(values: Values) -> str:
    """``lr=0.0001 train_batch_size=16``"""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())


def on_terminal(table: Table) -> RichTable:
    """Return the table for a terminal."""
    shown = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in columns(table):
        two_lines = heading if "\n" in heading else f"\n{heading}"
        shown.add_column(two_lines, justify="left" if heading == "recipe" else "right", no_wrap=True)
    for cells in _cells(table):
        shown.add_row(*cells)
    return shown


def in_markdown(table: Table) -> str:
    """Return the caption, the table, its legend and its notes as Markdown."""
    headings = [heading.replace("\n", " ") for heading in columns(table)]
    rule = ["---", *["--:"] * (len(headings) - 1)]
    lines = [_pipes(headings), _pipes(rule), *map(_pipes, _cells(table))]
    bullets = "\n".join(f"- {note}" for note in notes(table))
    return f"{caption(table)}\n\n" + "\n".join(lines) + f"\n\n{LEGEND}\n\n{bullets}\n"


def _cells(table: Table) -> list[list[str]]:
    return [[cell(row) for cell in columns(table).values()] for row in table.rows]


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: Interval) -> str:
    return f"{100 * value.mean:.1f}%" + _half(value, scale=100)


def _points(value: Interval | None) -> str:
    return "" if value is None else f"{100 * value.mean:+.1f}" + _half(value, scale=100)


def _spread(value: Interval) -> str:
    digits = 0 if value.mean >= 1000 else 1
    return _mean(value, digits) + _half(value, digits=digits)


def _half(value: Interval, scale: float = 1, digits: int = 1) -> str:
    return "" if value.half is None else f" ± {scale * value.half:,.{digits}f}"


def _mean(value: Interval, digits: int) -> str:
    return f"{value.mean:,.{digits}f}"


def _reached(cost: float | None, kind: str) -> str:
    return "not reached" if cost is None else f"{cost:,.1f}" if kind == "minutes" else f"{cost:,.0f}"


def _cost(what: str, spent: Spent) -> str:
    time = clock(60 * spent.wall_minutes)
    return f"{what}: {spent.arms} arms, {spent.rollouts:,.0f} rollouts, {spent.tokens:,.0f} tokens, {time}"
