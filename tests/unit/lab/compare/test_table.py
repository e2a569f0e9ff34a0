"""The table is a function of the results and of nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.lab.compare.arms import ending, result, study

from goldilocks.lab.compare.arm import EqualCost
from goldilocks.lab.compare.pictures import curves
from goldilocks.lab.compare.show import caption, in_markdown, notes, tables
from goldilocks.lab.compare.study import Results
from goldilocks.lab.compare.table import make_table


def table(*reported, tuned=(), **of_study):
    recipes = tuple(dict.fromkeys(one.recipe for one in reported))
    seeds = len(reported) // len(recipes)
    return make_table(study(*recipes, seeds=seeds, **of_study), Results(tuple(tuned), tuple(reported)))


def values_of(made):
    return json.loads(json.dumps(asdict(made)))


def table_of(ends, **of_study):
    """The table of recipes that end with these accuracies, seed by seed."""
    reported = [
        result(recipe, ending(end), seed=seed) for recipe, own in ends.items() for seed, end in enumerate(own, start=1)
    ]
    return table(*reversed(reported), **of_study)


def on(row, clock, baseline="grpo"):
    (found,) = (one for one in row.against if (one.baseline, one.clock) == (baseline, clock))
    return found


def test_over_seeds_it_is_the_mean_with_its_interval():
    row = table_of({"grpo": (0.5, 0.6, 0.7)}).rows[0]
    assert row.accuracy["rollouts"].mean == pytest.approx(0.6)
    assert row.accuracy["rollouts"].half == pytest.approx(4.302652730 * 0.1 / 3**0.5)
    assert row.gain.mean == pytest.approx(0.4)
    assert row.seeds == 3


def test_against_the_baseline_it_is_the_difference_seed_by_seed():
    made = table_of({"dapo": (0.34, 0.56, 0.74), "grpo": (0.3, 0.5, 0.7)}, against=("grpo",))
    dapo = next(row for row in made.rows if row.recipe == "dapo")
    against = on(dapo, "rollouts")
    assert against.difference.mean == pytest.approx(0.14 / 3)
    assert against.difference.half == pytest.approx(4.302652730 * 0.02 / 3**0.5 / 3**0.5)
    assert against.difference.half < dapo.accuracy["rollouts"].half, (
        "what the seeds have in common is not counted against it"
    )
    assert against.seen == pytest.approx(against.difference.half * (1 + 1.060660172 / 4.302652730))
    assert "| +4.7 ± 2.9 | 3.6 |" in in_markdown(made)
    assert against.differences == pytest.approx((0.04, 0.06, 0.04)), "by seed, whatever order the arms ended in"
    assert notes(made)[0] == "dapo against grpo, seed by seed: +4.0, +6.0, +4.0 points"
    assert [row.against for row in made.rows if row.recipe == "grpo"] == [()]
    level = table_of({"grpo": (0.6,), "dapo": (0.59999,)}, against=("grpo",))
    assert tables(level)[1].rows[0][2] == "+0.0", "what rounds to nothing has no minus"


def test_every_table_has_three_clocks_and_the_others_end_where_the_first_arm_does():
    cheap = result("grpo", [(0, 0.2), (1000, 0.7)])
    dear = replace(cheap, recipe="dapo", validations=tuple(
        replace(one, tokens=2 * one.tokens, seconds=4 * one.seconds) for one in cheap.validations))  # fmt: skip
    made = table(cheap, dear)
    assert [str(one.cost) for one in made.clocks] == ["1,000 rollouts", "10,000 tokens", "0.1 seconds"]
    assert tables(made)[0].headings[1:4] == tuple(f"accuracy at\n{one.cost}" for one in made.clocks)
    assert [row[:2] for row in tables(made)[1].rows] == [("dapo", kind) for kind in ("rollouts", "tokens", "seconds")]
    level, behind, far = (on(made.rows[1], kind) for kind in ("rollouts", "tokens", "seconds"))
    assert level.difference.mean == 0
    assert level.prices[-1].ratio == pytest.approx(1)
    assert behind.difference.mean == pytest.approx(-0.45 / 2), "half of the way that the mean of 0.8 to 1 has gone"
    assert behind.prices[0].ratio == pytest.approx(2)
    assert behind.prices[-1].cost is None
    assert far.difference.mean == pytest.approx(-0.45 * 3 / 4)


def test_seconds_are_compared_where_arms_ran_alone_and_a_note_says_where():
    def of(*alone):
        return [
            replace(result(recipe, seed=seed), alone=seed in alone) for recipe in ("grpo", "dapo") for seed in (1, 2)
        ]

    assert [one.seeds for one in table(*of(1, 2)).clocks] == [(1, 2)] * 3
    assert not [line for line in notes(table(*of(1, 2))) if "seconds are" in line]
    some, none = table(*of(2)), table(*of())
    assert [(one.cost.kind, one.seeds) for one in some.clocks[2:]] == [("seconds", (2,))]
    assert len(on(some.rows[1], "seconds").differences) == 1
    assert [line for line in notes(some) if line.startswith("seconds are of seeds 2 alone")]
    assert [one.cost.kind for one in none.clocks] == ["rollouts", "tokens"]
    assert [line for line in notes(none) if line.startswith("seconds are not compared")]


def test_there_may_be_several_baselines_each_with_its_own_differences():
    made = table_of({"grpo": (0.6,), "dapo": (0.7,), "pilot": (0.65,)}, against=("dapo", "grpo"))
    pilot = next(row for row in made.rows if row.recipe == "pilot")
    assert made.baselines == ("dapo", "grpo")
    assert on(pilot, "rollouts", "dapo").difference.mean == pytest.approx(-0.05)
    assert on(pilot, "rollouts", "grpo").difference.mean == pytest.approx(0.05)
    assert [sheet.title for sheet in tables(made)[1:]] == ["against dapo", "against grpo"]


def test_a_price_has_its_ratio_and_interval_and_what_is_not_reached_says_so():
    made = table(
        *(result("grpo", [(0, 0.2), (1000, 0.6 + seed / 100)], seed=seed) for seed in (1, 2, 3)),
        *(result("dapo", [(0, 0.2), (500, 0.6), (1000, 0.61 if seed < 3 else 0.66)], seed=seed) for seed in (1, 2, 3)),
        *(result("pilot", [(0, 0.2), (1000, 0.5)], seed=seed) for seed in (1, 2, 3)),
    )
    dapo, pilot = tables(made)[1].rows[0], tables(made)[1].rows[3]
    assert re.fullmatch(r"\d{3} 0\.\d\d× \(0\.\d\d–(0\.\d\d|not reached)\)", dapo[-1]), dapo[-1]
    assert pilot[-1] == "not reached"


def test_many_differences_are_said_to_be_many_and_which_hold_together():
    ends = {"grpo": (0.50, 0.51, 0.52), "dapo": (0.60, 0.61, 0.63), "pilot": (0.53, 0.55, 0.56)}
    (line,) = [line for line in notes(table_of(ends, against=("grpo",))) if "differences at" in line]
    assert line.startswith(
        "2 differences at 1,000 rollouts: were there none, some interval would leave out 0 in up to 10%"
    )
    assert "with intervals of 97.5%" in line
    assert "dapo against grpo (+10.3 ± 2.1)" in line
    two = table_of({recipe: ends[recipe] for recipe in ("grpo", "dapo")}, against=("grpo",))
    assert not [line for line in notes(two) if "differences at" in line]


def test_arms_that_differ_in_commit_version_device_or_recipe_are_not_in_one_table_without_a_word():
    def made(*origins):
        return table(*(replace(result("grpo", seed=seed), origin=origin) for seed, origin in enumerate(origins, 1)))

    assert made({"commit": "a", "trl": "1"}, {"trl": "1", "commit": "a"}).mixed == {}
    mixed = made({"commit": "a"}, {"commit": "b"}, {"commit": "a", "trl": "1"})
    assert "arms differ in commit, which may be what sets them apart: a (grpo-seed1, grpo-seed3); b (grpo-seed2)" in (
        notes(mixed)
    )
    assert mixed.mixed["trl"] == {"none": ["grpo-seed1", "grpo-seed2"], "1": ["grpo-seed3"]}
    recipes = [replace(result(recipe), origin={f"recipe {recipe}": recipe}) for recipe in ("grpo", "dapo")]
    assert table(*recipes).mixed == {}, "each recipe has a digest of its own"
    assert made({"recipe grpo": "1"}, {"recipe grpo": "2"}).mixed.keys() == {"recipe grpo"}


def test_too_few_answers_to_validate_by_are_said_with_how_many_are_needed():
    (line,) = [line for line in notes(table(replace(result("grpo"), answers=256))) if "answers" in line]
    assert line.startswith("a validation has 256 answers: an arm's own error is up to 1.8 points; 4 times the samples")
    assert not [line for line in notes(table(replace(result("grpo"), answers=1024))) if "answers" in line]


def test_of_a_baseline_that_has_hardly_gained_costs_are_said_to_say_little():
    said = "grpo gained +1.0 points: costs to its accuracy say little"
    assert said in notes(table_of({"grpo": (0.21,), "dapo": (0.6,)}, against=("grpo",)))
    unsure = notes(table_of({"grpo": (0.2, 0.8), "dapo": (0.6, 0.6)}, against=("grpo",)))
    assert [line for line in unsure if line.startswith("grpo gained +30.0 ± 381")]
    assert not [line for line in notes(table(result("grpo"), result("dapo"))) if "gained" in line]


def test_what_an_update_cost_and_trained_is_shown():
    made = table(result("grpo", updates=20, informative=50))
    shown = dict(zip(tables(made)[0].headings, tables(made)[0].rows[0], strict=True))
    assert (shown["updates"], shown["rollouts\nper update"], shown["groups per\nupdate"]) == ("20", "50", "2.5")
    twice = table(replace(result("grpo", updates=20, informative=50), epochs=2))
    assert twice.rows[0].informative_groups_per_update.mean == 5, "each update of a batch trains all of its groups"


def test_accuracy_by_level_is_at_the_budget_beside_that_before_training_where_every_arm_has_it():
    arms = [
        result("grpo", levels=((1, 0.5, 0.9), (2, 0.1, 0.3))),
        result("dapo", levels=((1, 0.5, 0.7), (2, 0.1, 0.2))),
    ]
    shown = tables(table(*arms))[-1]
    assert (shown.title, shown.headings) == ("accuracy by level", ("recipe", "1", "2"))
    assert shown.rows == (("before training", "50.0%", "10.0%"), ("grpo", "90.0%", "30.0%"), ("dapo", "70.0%", "20.0%"))
    assert tables(table(arms[0], result("dapo", levels=((2, 0.1, 0.2),))))[-1].headings == ("recipe", "2")
    assert len(tables(table(result("grpo", levels=((1, 0.5, 0.9),)), result("dapo")))) == 2


def test_yields_are_of_what_was_trained_over_all_that_was_generated():
    row = table(result("grpo", [(0, 0.2), (2000, 0.6)], informative=50, signal=80)).rows[0]
    assert row.informative_groups_per_1k_rollouts.mean == 25
    assert row.signal_per_1k_rollouts.mean == 40
    assert row.informative_groups_per_1m_tokens.mean == 2500
    assert row.signal_per_1m_tokens.mean == 4000


@pytest.mark.parametrize(("kind", "amount"), [("tokens", 5000), ("seconds", 0.05), ("rollouts", 500)])
def test_the_cost_may_be_any_of_the_three(kind, amount):
    made = table(result("grpo", [(0, 0.2), (500, 0.6), (1000, 0.6)]), cost=EqualCost(kind, amount))
    assert made.clocks[0].cost == EqualCost(kind, amount)
    assert made.rows[0].accuracy[kind].mean == pytest.approx(0.2 + 0.4 * 0.9)


def test_tuning_is_shown_with_what_it_cost_and_is_no_part_of_the_rows():
    tried = [result("grpo", ending(end), seed=1000, settings={"a.lr": lr}) for lr, end in
             (("1", 0.3), ("2", 0.5))]  # fmt: skip
    made = table(result("grpo", settings={"a.lr": "2"}), tuned=tried, grid={"a.lr": ("1", "2")})
    assert [(trial.settings, trial.accuracy, trial.chosen) for trial in made.trials] == [
        ({"a.lr": "1"}, pytest.approx(0.3), False),
        ({"a.lr": "2"}, pytest.approx(0.5), True),
    ]
    assert (made.tuning.arms, made.tuning.rollouts, made.reported.arms) == (2, 2000, 1)
    assert "grpo: lr=2 (tried: 1 30.0%, 2 50.0%)" in notes(made)
    assert notes(made)[-1] == "grpo: its best lr=2 is the highest value tried; a higher one may be better"
    assert values_of(made)["edges"] == [{"recipe": "grpo", "key": "a.lr", "value": "2", "side": "highest"}]


def test_in_markdown_every_row_has_every_column():
    made = table(result("grpo"), result("dapo", ending(0.5)))
    lines = [line for line in in_markdown(made).splitlines() if line.startswith("|")]
    assert [line.count("|") for line in lines] == [15] * 4 + [8] * 5
    assert "not reached" in lines[6]
    assert caption(made) == "at 1,000 rollouts each, 1 seed; 20.0% before training"


def test_a_picture_is_the_mean_of_the_seeds_up_to_the_end_of_its_clock_and_no_further():
    reported = tuple(
        result("grpo", [(0, 0.2), (100, end), (1100, end)], seed=seed) for seed, end in ((1, 0.4), (2, 0.9))
    )
    plots = curves(make_table(study("grpo", seeds=2), Results((), reported)), Results((), reported))
    assert [plot.name for plot in plots] == ["curves", "curves-tokens", "curves-seconds"]
    assert [row["cost"] for row in plots[0].values] == [50 * part for part in range(21)]
    assert plots[1].values[-1]["cost"] == 11_000
    assert plots[0].values[0] == pytest.approx({"recipe": "grpo", "cost": 0, "accuracy": 0.2, "low": 0.2, "high": 0.2})
    last = plots[0].values[-1]
    assert last["accuracy"] == pytest.approx(0.65)
    assert last["low"] == 0.0, "two seeds that differ so much say nothing, and no accuracy is below 0"
    assert last["high"] == 1.0
    assert plots[0].spec()["layer"]


ends = st.floats(0, 1)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(st.tuples(ends, ends), min_size=2, max_size=5), st.randoms())
def test_in_whatever_order_arms_ended_the_table_is_the_same(accuracies, random):
    reported = [
        result(recipe, [(0, 0.2), (500, middle), (1000 + seed, end)], seed=seed)
        for seed, (middle, end) in enumerate(accuracies, start=1)
        for recipe in ("grpo", "dapo")
    ]
    made = make_table(study(seeds=len(accuracies)), Results((), tuple(reported)))
    random.shuffle(reported)
    assert make_table(study(seeds=len(accuracies)), Results((), tuple(reported))) == made
    assert made.rows[0].accuracy == made.rows[1].accuracy
    assert all(price.ratio <= 1 for price in made.rows[1].against[0].prices), "it pays what the baseline does, or less"
