"""The table for people: the same cells on a terminal, in Markdown and on the study's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from goldilocks.config.recipes import name_of
from goldilocks.lab.compare.arm import Values
from goldilocks.lab.compare.table import SHARES, Against, Estimate, Interval, RecipeRow, Spent, Table, Target
from goldilocks.runs.progress import clock
from goldilocks.sheet import Sheet

Cell = Callable[[RecipeRow], str]

NOT_REACHED, BEFORE = "not reached", "before training"
LEGEND = """\
accuracy: at the equal cost, mean ± 95% t-interval over the seeds; groups: trained groups whose rewards differ; signal:
Σ(r − r̄)² over the trained rollouts; both per rollout or token generated. time: wall-clock of an arm, with its start
and its validations. difference: seed by seed, in points; at ⅔: accuracy at two thirds of the cost minus the baseline's
at the full cost, seed by seed; to N%: the cost at which the mean curve first has N% of the baseline's gain, its ratio
to what the baseline itself needs for that, and the ratio's 95% interval by bootstrap over the seeds."""


def tables(table: Table) -> list[Sheet]:
    """Return the study's table, one for each baseline, and the accuracies by column if there are any."""
    against = [_baseline(table, place) for place in range(len(table.baselines))]
    return [_main(table), *against, *(_by_column(table, *column) for column in table.columns.items())]


def _sheet(title: str, cells: Mapping[str, Cell], table: Table) -> Sheet:
    rows = tuple(tuple(cell(row) for cell in cells.values()) for row in table.rows)
    return Sheet(tuple(cells), rows, title)


def _main(table: Table) -> Sheet:
    cells: dict[str, Cell] = {
        "recipe": lambda row: name_of(row.recipe),
        "accuracy": lambda row: _percent(row.accuracy),
        "updates": lambda row: _mean(row.updates, 0),
        "rollouts\nper update": lambda row: _mean(row.rollouts_per_update, 0),
        "groups per\nupdate": lambda row: _mean(row.informative_groups_per_update, 1),
        "groups per\n1k rollouts": lambda row: _spread(row.informative_groups_per_1k_rollouts),
        "signal per\n1k rollouts": lambda row: _spread(row.signal_per_1k_rollouts),
        "groups per\n1M tokens": lambda row: _spread(row.informative_groups_per_1m_tokens),
        "signal per\n1M tokens": lambda row: _spread(row.signal_per_1m_tokens),
        "rollouts": lambda row: _mean(row.rollouts, 0),
        "tokens": lambda row: _mean(row.tokens, 0),
        "time": lambda row: clock(row.wall_seconds.mean),
    }
    return _sheet(caption(table), cells, table)


def _baseline(table: Table, place: int) -> Sheet:

    def against(row: RecipeRow) -> Against:
        return row.against[place]

    kind, baseline = table.cost.kind, name_of(table.baselines[place])
    goals = table.rows[0].against[place].targets
    cells: dict[str, Cell] = {
        "recipe": lambda row: name_of(row.recipe),
        "difference": lambda row: _points(against(row).difference),
        f"at ⅔ of the\n{kind}": lambda row: _points(against(row).at_two_thirds),
    }
    for number, goal in enumerate(goals):
        heading = f"{kind} to {goal.share:.0%}\n({100 * goal.accuracy:.1f}%)"
        cells[heading] = lambda row, number=number: _paid(against(row).targets[number], kind)  # type: ignore[misc]
    title = f"against {baseline}" + ("" if goals else ", which has not gained: there is no cost to reach its gain")
    return _sheet(title, cells, table)


def _by_column(table: Table, column: str, values: Sequence[str]) -> Sheet:
    start = (BEFORE, *(f"{100 * table.start_levels[column][value].mean:.1f}%" for value in values))
    rows = [(name_of(row.recipe), *(_percent(row.levels[column][value]) for value in values)) for row in table.rows]
    return Sheet(("recipe", *values), (start, *rows), f"accuracy by {column}")


def caption(table: Table) -> str:
    """``at 20,000 rollouts each, 3 seeds; 39.1% before training``"""
    seeds = table.rows[0].seeds
    over = "1 seed" if seeds == 1 else f"{seeds} seeds"
    return f"at {table.cost} each, {over}; {100 * table.start:.1f}% before training"


def notes(table: Table) -> list[str]:
    """Return everything that is said beside the tables."""
    baselines = range(len(table.baselines))
    return [*(line for place in baselines for line in by_seed(table, place)), *spent(table), *warnings(table)]


def spent(table: Table) -> list[str]:
    """Return what everything cost, and what tuning tried and chose."""
    lines = [_cost("the arms of the table", table.reported)]
    if table.trials:
        seeds = table.tuning.arms // len(table.trials)
        lines.append(_cost(f"tuning before it, {'one seed' if seeds == 1 else f'{seeds} seeds'}", table.tuning))
        lines += [_tuned(row, table) for row in table.rows]
    return lines


def warnings(table: Table) -> list[str]:
    """Return a line for every recipe whose best value is the lowest or the highest one tried."""
    return [
        f"{name_of(edge.recipe)}: its best {settings({edge.key: edge.value})} is the {edge.side} value tried; "
        f"a {'lower' if edge.side == 'lowest' else 'higher'} one may be better"
        for edge in table.edges
    ]


def _tuned(row: RecipeRow, table: Table) -> str:
    own = [trial for trial in table.trials if trial.recipe == row.recipe]
    tried = ", ".join(f"{'/'.join(trial.settings.values())} {100 * trial.accuracy:.1f}%" for trial in own)
    return f"{name_of(row.recipe)}: {settings(row.settings)} (tried: {tried})"


def by_seed(table: Table, place: int) -> list[str]:
    """Return the differences to a baseline seed by seed and along the way, and which targets some draws miss."""
    baseline = name_of(table.baselines[place])
    rows = [(f"{name_of(row.recipe)} against {baseline}", row.against[place]) for row in table.rows]
    others = [(pair, against) for pair, against in rows if len(against.differences) > 1]
    at = f"at {', '.join(f'{share:.0%}' for share in SHARES)} of the {table.cost.kind}"
    lines = [f"{pair}, seed by seed: {', '.join(map(_signed, own.differences))} points" for pair, own in others]
    lines += [f"{pair} {at}: {', '.join(map(_points, own.along))}" for pair, own in others]
    for pair, own in others:
        unsure = [f"{goal.share:.0%} in {goal.reached:.0%}" for goal in own.targets if 0 < goal.reached < 1]
        said = f"{pair}, shares of the gain by how many draws of the seeds reach them: {', '.join(unsure)}"
        lines += [said] if unsure else []
    targets = table.rows[0].against[place].targets
    if targets and targets[0].gained < 1:
        none = f"{baseline} gains nothing in {1 - targets[0].gained:.0%} of the draws of the seeds"
        lines.append(f"{none}, which are left out")
    return lines


def settings(values: Values) -> str:
    """``lr=0.0001 train_batch_size=16``"""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())


def in_markdown(table: Table) -> str:
    """Return the tables, their legend and the notes as Markdown."""
    bullets = "\n".join(f"- {note}" for note in notes(table))
    return "\n".join(sheet.in_markdown() for sheet in tables(table)) + f"\n{LEGEND}\n\n{bullets}\n"


def in_html(table: Table) -> str:
    """Return the tables for a notebook."""
    return "".join(sheet.in_html() for sheet in tables(table))


def _percent(value: Interval) -> str:
    return f"{100 * value.mean:.1f}%" + _half(value, scale=100)


def _points(value: Interval | None) -> str:
    return "" if value is None else _signed(value.mean) + _half(value, scale=100)


def _signed(difference: float) -> str:
    """Return a difference in points; one that rounds to nothing is +0.0, not -0.0."""
    return f"{round(100 * difference, 1) + 0.0:+.1f}"


def _spread(value: Interval) -> str:
    digits = 0 if value.mean >= 1000 else 1
    return _mean(value, digits) + _half(value, digits=digits)


def _half(value: Interval, scale: float = 1, digits: int = 1) -> str:
    return "" if value.half is None else f" ± {scale * value.half:,.{digits}f}"


def _mean(value: Interval, digits: int) -> str:
    return f"{value.mean:,.{digits}f}"


def _paid(target: Target, kind: str) -> str:
    """``4,096 0.50× (0.41–0.66)``: the cost, its ratio to the baseline's, and the ratio's interval."""
    if target.cost.value is None:
        return NOT_REACHED + _between(target.ratio)
    cost = f"{target.cost.value:,.{1 if kind == 'seconds' else 0}f}"
    return f"{cost} {target.ratio.value:.2f}×" + _between(target.ratio)


def _between(estimate: Estimate) -> str:
    """Return the ends of an interval; nothing if there is none, or if no draw reaches the target."""
    low, high = estimate.interval or (None, None)
    if low is None or low == high == 1:
        return ""
    return f" ({low:.2f}–{NOT_REACHED if high is None else f'{high:.2f}'})"


def _cost(what: str, spent: Spent) -> str:
    time = clock(spent.wall_seconds)
    return f"{what}: {spent.arms} arms, {spent.rollouts:,.0f} rollouts, {spent.tokens:,.0f} tokens, {time}"
