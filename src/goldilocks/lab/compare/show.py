"""The table for people: the same cells on a terminal, in Markdown and on the study's page."""

from __future__ import annotations

import math
from collections.abc import Callable

from goldilocks.config.recipes import name_of
from goldilocks.lab import CONFIDENCE, Interval
from goldilocks.lab.compare.arm import Values
from goldilocks.lab.compare.study import SAMPLES, SHARES
from goldilocks.lab.compare.table import POWER, Against, Price, RecipeRow, Table
from goldilocks.runs.costs import clock
from goldilocks.sheet import Sheet

NOT_REACHED, BEFORE = "not reached", "before training"
LEAST_GAIN, MOST_ERROR = 0.03, 0.01  # below, above: what is said of accuracies is doubtful
LEGEND = f"""\
accuracy: mean of the last {len(SHARES)} validations, ± 95% t-interval over the seeds; groups: trained groups whose
rewards differ; signal: Σ(r − r̄)² over the trained rollouts; both per rollout or token generated. seconds: of updates;
time: wall-clock of an arm, with its start and its validations. difference: seed by seed, in points; could see: the
smallest difference that {POWER:.0%} of studies with such seeds would show; to its accuracy at N%: what a recipe pays
for the accuracy that the baseline has after N% of that clock, and the ratio of both costs with its 95% t-interval."""


def tables(table: Table) -> list[Sheet]:
    """Return the study's table, one for each baseline, and the accuracies by column if there are any."""
    sheets = [_main(table), *(_baseline(table, baseline) for baseline in table.baselines)]
    for column, values in table.columns.items():
        start = (BEFORE, *(f"{100 * table.start_levels[column][value].mean:.1f}%" for value in values))
        rows = [(name_of(row.recipe), *(_percent(row.levels[column][value]) for value in values)) for row in table.rows]
        sheets.append(Sheet(("recipe", *values), (start, *rows), f"accuracy by {column}"))
    return sheets


def _main(table: Table) -> Sheet:
    cells: dict[str, Callable[[RecipeRow], str]] = {"recipe": lambda row: name_of(row.recipe)}
    for one in table.clocks:
        cells[f"accuracy at\n{one.cost}"] = lambda row, kind=one.cost.kind: _percent(row.accuracy[kind])  # type: ignore[misc]
    cells |= {
        "updates": lambda row: f"{row.updates.mean:,.0f}",
        "rollouts\nper update": lambda row: f"{row.rollouts_per_update.mean:,.0f}",
        "groups per\nupdate": lambda row: f"{row.informative_groups_per_update.mean:,.1f}",
        "groups per\n1k rollouts": lambda row: _spread(row.informative_groups_per_1k_rollouts),
        "signal per\n1k rollouts": lambda row: _spread(row.signal_per_1k_rollouts),
        "groups per\n1M tokens": lambda row: _spread(row.informative_groups_per_1m_tokens),
        "rollouts": lambda row: f"{row.rollouts.mean:,.0f}",
        "tokens": lambda row: f"{row.tokens.mean:,.0f}",
        "seconds": lambda row: f"{row.seconds.mean:,.0f}",
        "time": lambda row: clock(row.wall_seconds.mean),
    }
    rows = tuple(tuple(cell(row) for cell in cells.values()) for row in table.rows)
    return Sheet(tuple(cells), rows, caption(table))


def _baseline(table: Table, baseline: str) -> Sheet:
    pairs = [(row, one) for row in table.rows for one in row.against if one.baseline == baseline]
    prices = [f"to its accuracy\nat {price.share:.0%}" for _, one in pairs[:1] for price in one.prices]
    rows = [
        (
            name_of(row.recipe),
            one.clock,
            _points(one.difference),
            "" if one.seen is None else f"{100 * one.seen:.1f}",
            *(_paid(price) for price in one.prices),
        )
        for row, one in pairs
    ]
    return Sheet(("recipe", "clock", "difference", "could see", *prices), rows, f"against {name_of(baseline)}")


def caption(table: Table) -> str:
    """``at 20,000 rollouts each, 3 seeds; 39.1% before training``"""
    seeds = table.rows[0].seeds
    over = "1 seed" if seeds == 1 else f"{seeds} seeds"
    return f"at {table.cost} each, {over}; {100 * table.start:.1f}% before training"


def notes(table: Table) -> list[str]:
    return [*(line for one in table.baselines for line in by_seed(table, one)), *spent(table), *warnings(table)]


def by_seed(table: Table, baseline: str) -> list[str]:
    """Return the differences to a baseline seed by seed at the equal cost, and whether it has gained itself."""
    lines = []
    for row in table.rows:
        for one in row.against:
            if one.baseline == baseline and one.clock == table.cost.kind and len(one.differences) > 1:
                by_seed = ", ".join(map(_signed, one.differences))
                lines.append(f"{name_of(row.recipe)} against {name_of(baseline)}, seed by seed: {by_seed} points")
    gain = next(row.gain for row in table.rows if row.recipe == baseline)
    if gain.mean < max(LEAST_GAIN, gain.half or 0.0):
        lines.append(f"{name_of(baseline)} gained {_points(gain)} points: costs to its accuracy say little")
    return lines


def spent(table: Table) -> list[str]:
    """Return what everything cost, and what tuning tried and chose."""
    of = {"the arms of the table": table.reported}
    if table.trials:
        seeds = table.tuning.arms // len(table.trials)
        of[f"tuning before it, {'one seed' if seeds == 1 else f'{seeds} seeds'}"] = table.tuning
    lines = [
        f"{what}: {one.arms} arms, {one.rollouts:,.0f} rollouts, {one.tokens:,.0f} tokens, {clock(one.wall_seconds)}"
        for what, one in of.items()
    ]
    for row in table.rows if table.trials else ():
        own = [trial for trial in table.trials if trial.recipe == row.recipe]
        tried = ", ".join(f"{'/'.join(trial.settings.values())} {100 * trial.accuracy:.1f}%" for trial in own)
        lines.append(f"{name_of(row.recipe)}: {settings(row.settings)} (tried: {tried})")
    return lines


def warnings(table: Table) -> list[str]:
    """Return what makes the table say less: many comparisons, arms that differ, few answers, edges of the grid."""
    lines = [*_many(table)]
    for key, values in table.mixed.items():
        arms = "; ".join(f"{value} ({', '.join(names)})" for value, names in values.items())
        lines.append(f"arms differ in {key}, which may be what sets them apart: {arms}")
    timed = next((one.seeds for one in table.clocks if one.cost.kind == "seconds"), ())
    if len(timed) < table.rows[0].seeds:
        which = f"of seeds {', '.join(map(str, timed))} alone: the other" if timed else "not compared:"
        lines.append(f"seconds are {which} arms ran beside others (--parallel 1 keeps them apart)")
    error = 0.5 / math.sqrt(len(SHARES) * table.answers) if table.answers else 0.0
    if error > MOST_ERROR:
        times = math.ceil((error / MOST_ERROR) ** 2)
        said = f"a validation has {table.answers:,} answers: an arm's own error is up to {100 * error:.1f} points"
        lines.append(f"{said}; {times} times the samples ({SAMPLES}) bring it under one")
    lines += [
        f"{name_of(edge.recipe)}: its best {settings({edge.key: edge.value})} is the {edge.side} value tried; "
        f"a {'lower' if edge.side == 'lowest' else 'higher'} one may be better"
        for edge in table.edges
    ]
    return lines


def _many(table: Table) -> list[str]:
    """Return what several differences at the equal cost mean together, by Bonferroni's bound; nothing for one."""
    pairs = [(row, one) for row in table.rows for one in row.against if one.clock == table.cost.kind]
    if len(pairs) < 2 or len(pairs[0][1].differences) < 2:
        return []
    each = 1 - (1 - CONFIDENCE) / len(pairs)

    def wider(one: Against) -> Interval:
        return Interval.of(one.differences, each)

    clear = [
        f"{name_of(row.recipe)} against {name_of(one.baseline)} ({_points(wider(one))})"
        for row, one in pairs
        if abs(one.difference.mean) > (wider(one).half or 0.0)
    ]
    chance = min(1.0, len(pairs) * (1 - CONFIDENCE))
    return [
        f"{len(pairs)} differences at {table.cost}: were there none, some interval would leave out 0 in up to "
        f"{chance:.0%} of such studies; with intervals of {each:.1%}, all of which hold in 95%, these do: "
        f"{', '.join(clear) or 'none'}"
    ]


def settings(values: Values) -> str:
    """``lr=0.0001 train_batch_size=16``"""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())


def in_markdown(table: Table) -> str:
    bullets = "\n".join(f"- {note}" for note in notes(table))
    return "\n".join(sheet.in_markdown() for sheet in tables(table)) + f"\n{LEGEND}\n\n{bullets}\n"


def _percent(value: Interval) -> str:
    return f"{100 * value.mean:.1f}%" + _half(value, scale=100)


def _points(value: Interval) -> str:
    return _signed(value.mean) + _half(value, scale=100)


def _signed(difference: float) -> str:
    """Return a difference in points; one that rounds to nothing is +0.0, not -0.0."""
    return f"{round(100 * difference, 1) + 0.0:+.1f}"


def _spread(value: Interval) -> str:
    digits = 0 if value.mean >= 1000 else 1
    return f"{value.mean:,.{digits}f}" + _half(value, digits=digits)


def _half(value: Interval, scale: float = 1, digits: int = 1) -> str:
    return "" if value.half is None else f" ± {scale * value.half:,.{digits}f}"


def _paid(price: Price) -> str:
    """``4,096 0.50× (0.41–0.66)``: the cost, its ratio to the baseline's, and the ratio's interval."""
    said = NOT_REACHED if price.cost is None else f"{price.cost:,.{0 if price.cost >= 100 else 1}f} {price.ratio:.2f}×"
    low, high = price.interval or (None, None)
    return said if low is None else f"{said} ({low:.2f}–{NOT_REACHED if high is None else f'{high:.2f}'})"
