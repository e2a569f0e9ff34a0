"""The plots' data: what stands in them is what the run says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.lab.report.draw import Plot, smoothed, thinned
from goldilocks.lab.report.learning import by_column, learning, quantiles, ratios
from goldilocks.lab.report.page import SECTIONS, figures
from goldilocks.lab.report.rollouts import BINS, accounts, bin_of, pass_rates, rollouts, tokens
from goldilocks.lab.report.run import Run, read_run, read_runs
from goldilocks.runs.costs import spending
from goldilocks.runs.history import History, increments

series = st.dictionaries(st.integers(0, 10_000), st.floats(-1e6, 1e6), min_size=1, max_size=400).map(
    lambda values: dict(sorted(values.items()))
)


@pytest.fixture(scope="module")
def run(dapo: Path) -> Run:
    return read_run(dapo, "dapo")


def plot(section: object, name: str) -> Plot:
    return next(one for one in section.plots if one.name == name)  # type: ignore[attr-defined]


def data_names(spec: dict[str, Any]) -> set[str]:
    """Every data set that some layer reads."""
    own = {spec["data"]["name"]} if "data" in spec else set()
    return own.union(*(data_names(layer) for layer in spec.get("layer", [])))


def test_a_step_s_bars_sum_to_what_it_generated_and_a_run_s_shares_fill_the_bar(run: Run) -> None:
    heights: dict[str, float] = defaultdict(float)
    for row in plot(tokens([run]), "tokens-by-step-1").values:
        heights[row["steps"]] += row["tokens"]
    generated = increments(run.history.series("accounts/generated_tokens"))
    assert heights == {str(step): pytest.approx(value, rel=1e-4) for step, value in generated.items()}
    rows = plot(tokens([run]), "tokens-by-account").values
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-4)
    assert rows[0]["account"] == "trained"


def test_every_account_stands_once_with_its_reason(run: Run) -> None:
    found = accounts(run.history)
    assert {"trained", "filtered/too_easy", "filtered/too_hard"} <= set(found)
    assert "filtered" not in found
    assert sum(totals[24] for totals in found.values()) == run.history.last("accounts/generated_tokens")


def test_learning_is_drawn_against_every_cost(run: Run) -> None:
    names = [one.name for one in learning([run]).plots]
    costs = ("rollouts", "tokens", "seconds")
    assert names == [f"{what}-by-{cost}" for what in ("accuracy-arithmetic", "reward") for cost in costs]
    rows = plot(learning([run]), "accuracy-arithmetic-by-rollouts").values
    assert rows[0]["rollouts"] == 0
    assert rows[-1]["rollouts"] == run.history.last("accounts/generated_rollouts")


def test_rollouts_of_a_fixed_policy_are_its_n(run: Run) -> None:
    rows = plot(rollouts([run]), "rollouts-per-prompt").values
    assert {row["mean"] for row in rows if "mean" in row} == {8}
    assert {(row["fewest"], row["most"]) for row in rows if "most" in row} <= {(8, 8), (7, 8), (6, 8)}  # some fail


def test_trained_groups_of_dapo_are_never_at_the_ends(run: Run) -> None:
    rows = plot(pass_rates([run]), "pass-rates-trained-1").values
    assert {"0", "1"}.isdisjoint(row["row"] for row in rows)
    by_step: dict[int, float] = defaultdict(float)
    for row in rows:
        by_step[row["from"]] += row["share"]
    assert list(by_step.values()) == pytest.approx([1.0] * 12, abs=1e-4)


def test_ratio_quantiles_are_ordered_and_the_clip_is_drawn(run: Run) -> None:
    assert list(quantiles(run.history)) == [5, 50, 95]
    drawn = plot(ratios([run]), "ratios-1")
    bands = [row for row in drawn.values if "low" in row]
    assert len(bands) == 24
    assert all(row["low"] < row["high"] for row in bands)
    rules = [layer["encoding"]["y"]["datum"] for layer in drawn.spec()["layer"] if layer["mark"]["type"] == "rule"]
    assert rules == [1 - 3e-4, 1 + 4e-4]


def test_a_run_with_nothing_gives_notes_and_no_plots(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    empty = read_run(tmp_path, "empty")
    for make in SECTIONS:
        section = make([empty])
        assert section.plots == []
        assert section.notes or section.name == "pass-rates", "a run says itself that it has no answers and no beliefs"
    assert figures([empty]) == []


@pytest.mark.parametrize("left_out", ["accounts/", "timing_s/", "val-core/", "adaptive_rollout/", "length/", "actor/"])
def test_a_run_without_some_metrics_still_has_the_other_plots(run: Run, left_out: str) -> None:
    steps = {
        step: {name: value for name, value in data.items() if not name.startswith(left_out)}
        for step, data in run.history.steps.items()
    }
    history = History(steps)
    partial = replace(run, name="partial", history=history, spending=spending(history, run.config))
    sections = [make([run, partial]) for make in SECTIONS]
    assert sum(len(section.plots) for section in sections) >= 15
    assert any("by partial" in note for section in sections for note in section.notes)


def test_every_plot_has_a_name_of_its_own_and_something_to_show(dapo: Path, pilot: Path) -> None:
    plots = [plot for make in SECTIONS for plot in make(read_runs([dapo, pilot])).plots]
    assert len({one.name for one in plots}) == len(plots) == 19
    assert all(one.values for one in plots)
    for one in plots:
        spec = one.spec()
        assert data_names(spec) <= set(spec["datasets"])


def test_the_summary_compares_at_equal_rollouts(dapo: Path, pilot: Path) -> None:
    runs = read_runs([dapo, pilot])
    by_title = {figure.title: figure for figure in figures(runs)}
    assert list(by_title["updates"].values) == ["24", "16"]
    budget = min(run.spending.total("rollouts") or 0 for run in runs)
    assert by_title["at equal rollouts"].about.startswith("after ")
    for run, shown in zip(runs, by_title["at equal rollouts"].values, strict=True):
        paid = [
            value
            for step, value in run.history.series("val-core/arithmetic/acc/mean@1").items()
            if (run.spending.until("rollouts", step) or 0) <= budget
        ]
        assert shown == f"{100 * paid[-1]:.1f}%"
    assert any(by_title["accuracy"].best)


@given(st.floats(0, 1))
def test_every_pass_rate_has_its_bin(rate: float) -> None:
    place = BINS.index(bin_of(rate))
    assert (place == 0) == (rate == 0)
    assert (place == len(BINS) - 1) == (rate == 1)
    if 0 < rate < 1:
        low, high = map(float, BINS[place].split("–"))
        assert low - 1e-9 <= rate < high + 1e-9


@settings(max_examples=50)
@given(series, st.integers(1, 50))
def test_a_thinned_series_keeps_its_end_a_smoothed_one_its_steps_and_both_stay_within_their_range(
    values: dict[int, float], most: int
) -> None:
    thin, smooth = thinned(values, most), smoothed(values)
    assert len(thin) <= most
    assert list(thin)[-1] == list(values)[-1]
    assert list(smooth) == list(values)
    lowest, highest = min(values.values()) - 1e-3, max(values.values()) + 1e-3
    assert all(lowest <= value <= highest for value in (*thin.values(), *smooth.values()))


def test_what_was_believed_is_shown_below_each_validation_by_column(run: Run) -> None:
    logged = [
        {"step": 0, "data": {"val/level/1/acc": 0.1, "belief/level/1": 0.5}},
        {"step": 1, "data": {"belief/level/1": 0.2}},
        {"step": 2, "data": {"val/level/1/acc": 0.9, "belief/level/1": 0.6}},
    ]
    section = by_column([replace(run, history=History.of(logged))])
    assert [row["share"] for row in plot(section, "accuracy-by-column-1-1").values] == [0.1, 0.9]
    assert [row["share"] for row in plot(section, "belief-by-column-1-1").values] == [0.5, 0.6]


def test_accuracy_by_column_has_each_validation_and_its_ends(run: Run) -> None:
    logged = [
        {"step": step, "data": {f"val/level/{level}/acc": step / 10 / level for level in (10, 2, 1)}} for step in (0, 4)
    ]
    validated = replace(run, history=History.of([*logged, {"step": 4, "data": {"val/skill/<b>/acc": 0.5}}]))
    section = by_column([run, validated])
    assert [row["row"] for row in plot(section, "accuracy-by-column-1-2").values] == ["1", "1", "2", "2", "10", "10"]
    assert section.sheets[0].rows == [
        ["1", "–", "0.0% → 40.0%"],
        ["2", "–", "0.0% → 20.0%"],
        ["10", "–", "0.0% → 4.0%"],
    ]
    assert section.sheets[1].rows == [["<b>", "–", "50.0%"]]
    assert section.notes == [f"accuracy by column (goldilocks.validate_by): not logged by {run.name}"]
