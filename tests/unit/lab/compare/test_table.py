"""The table is a function of the results and of nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.lab.compare.arms import BUDGET, result, study

from goldilocks.lab.compare.arm import EqualCost
from goldilocks.lab.compare.pictures import curves
from goldilocks.lab.compare.show import caption, in_markdown, notes, tables
from goldilocks.lab.compare.study import Result, Results
from goldilocks.lab.compare.table import make_table


def table(*reported, tuned=(), **of_study):
    recipes = tuple(dict.fromkeys(one.recipe for one in reported))
    seeds = len(reported) // len(recipes)
    return make_table(study(*recipes, seeds=seeds, **of_study), Results(tuple(tuned), tuple(reported)))


def values_of(made):
    return json.loads(json.dumps(asdict(made)))


def test_accuracy_is_read_at_the_budget_and_not_at_the_end():
    made = table(result("grpo", [(0, 0.2), (900, 0.4), (1100, 0.8)]))
    assert made.rows[0].accuracy.mean == pytest.approx(0.6)
    assert made.rows[0].accuracy.half is None


def test_over_seeds_it_is_the_mean_with_its_interval():
    made = table(*(result("grpo", [(0, 0.2), (1000, end)], seed=seed) for seed, end in ((1, 0.5), (2, 0.6), (3, 0.7))))
    assert made.rows[0].accuracy.mean == pytest.approx(0.6)
    assert made.rows[0].accuracy.half == pytest.approx(4.302652730 * 0.1 / 3**0.5)
    assert made.rows[0].seeds == 3


def test_against_the_baseline_it_is_the_difference_seed_by_seed():
    ends = {"grpo": (0.3, 0.5, 0.7), "dapo": (0.34, 0.56, 0.74)}
    reported = [
        result(recipe, [(0, 0.2), (1000, end)], seed=seed)
        for recipe, own in ends.items()
        for seed, end in enumerate(own, start=1)
    ]
    made = table(*reported[:3], *reversed(reported[3:]))
    assert made.rows[0].against[0].difference is None
    against = made.rows[1].against[0].difference
    assert against is not None
    assert against.mean == pytest.approx(0.14 / 3)
    assert against.half == pytest.approx(4.302652730 * 0.02 / 3**0.5 / 3**0.5)
    assert against.half < made.rows[1].accuracy.half, "what the seeds have in common is not counted against it"
    assert "| +4.7 ± 2.9 |" in in_markdown(made)
    assert made.rows[1].against[0].differences == pytest.approx((0.04, 0.06, 0.04)), (
        "by seed, whatever order the arms ended in"
    )
    assert notes(made)[0] == "dapo against grpo, seed by seed: +4.0, +6.0, +4.0 points"


def test_at_two_thirds_of_the_cost_it_is_held_against_the_baseline_at_all_of_it():
    quick = [(0, 0.2), (600, 0.7), (900, 0.7), (1000, 0.8)]
    made = table(
        *(result("grpo", [(0, 0.2), (1000, 0.6 + seed / 100)], seed=seed) for seed in (1, 2)),
        *(result("dapo", quick, seed=seed) for seed in (1, 2)),
    )
    assert made.rows[1].against[0].at_two_thirds.mean == pytest.approx(0.7 - 0.615)
    assert made.rows[1].against[0].at_two_thirds.half == pytest.approx(12.7062047 * 0.01 / 2)
    assert made.rows[0].against[0].at_two_thirds.mean == pytest.approx((0.2 - 0.615) / 3), "what the last third brings"


def test_along_the_way_it_is_held_against_the_baseline_at_the_same_cost():
    sooner = [(0, 0.2), (400, 0.6), (1000, 0.6)]
    made = table(
        *(result("grpo", [(0, 0.2), (1000, 0.6)], seed=seed) for seed in (1, 2)),
        *(result("dapo", sooner, seed=seed) for seed in (1, 2)),
    )
    assert [one.mean for one in made.rows[1].against[0].along] == pytest.approx([0.06, 0.12, 0.18, 0.24, 0.16, 0.08])
    assert made.rows[0].against[0].along == ()
    assert notes(made)[1].startswith(
        "dapo against grpo at 10%, 20%, 30%, 40%, 60%, 80% of the rollouts: +6.0 ± 0.0, +12.0"
    )


def test_the_baseline_is_the_first_recipe_and_others_reach_it_sooner_later_or_not():
    made = table(
        result("grpo", [(0, 0.2), (1000, 0.6)]),
        result("dapo", [(0, 0.2), (500, 0.6), (1000, 0.7)]),
        result("pilot", [(0, 0.2), (1000, 0.5), (1400, 0.9)]),
    )
    assert [row.recipe for row in made.rows] == ["grpo", "dapo", "pilot"]
    whole = [row.against[0].targets[-1].cost.value for row in made.rows]
    assert whole == [pytest.approx(1000), pytest.approx(500), None], "what it reached beyond the budget does not count"


def test_there_may_be_several_baselines_each_with_its_own_differences_and_targets():
    made = table(
        result("grpo", [(0, 0.2), (1000, 0.6)]),
        result("dapo", [(0, 0.2), (500, 0.6), (1000, 0.7)]),
        result("pilot", [(0, 0.2), (1000, 0.65)]),
        against=("dapo", "grpo"),
    )
    assert made.baselines == ("dapo", "grpo")
    assert [one.difference and round(one.difference.mean, 9) for one in made.rows[2].against] == [-0.05, 0.05]
    assert [one.targets[-1].accuracy for one in made.rows[2].against] == pytest.approx([0.7, 0.6])
    shown = tables(made)
    assert [one.title for one in shown] == [caption(made), "against dapo", "against grpo"]
    assert shown[1].headings[-1] == "rollouts to 100%\n(70.0%)"
    assert [row[-1] for row in shown[1].rows] == ["not reached", "1,000 1.00×", "not reached"]
    assert [row[-1] for row in shown[2].rows] == ["1,000 1.00×", "500 0.50×", "889 0.89×"]


def test_a_target_that_some_draws_of_the_seeds_miss_says_so():
    nothing = [(0, 0.2), (1000, 0.2)]
    made = table(
        *(result("grpo", seed=seed) for seed in (1, 2, 3, 4)),
        *(
            result("dapo", [(0, 0.2), (500, 0.7), (1000, 0.7)] if seed < 4 else nothing, seed=seed)
            for seed in (1, 2, 3, 4)
        ),
    )
    assert tables(made)[1].rows[1][3] == "267 0.53× (0.40–not reached)"
    assert any(line.startswith("dapo against grpo, shares of the gain by how many draws") for line in notes(made))


def test_draws_without_a_gain_of_the_baseline_are_said():
    made = table(
        *(result("grpo", [(0, 0.2), (1000, end)], seed=seed) for seed, end in ((1, 0.6), (2, 0.2))),
        *(result("dapo", seed=seed) for seed in (1, 2)),
    )
    (line,) = [line for line in notes(made) if "gains nothing" in line]
    assert re.fullmatch(r"grpo gains nothing in 2\d% of the draws of the seeds, which are left out", line)


def test_a_difference_that_rounds_to_nothing_has_no_minus():
    made = table(result("grpo", [(0, 0.2), (1000, 0.6)]), result("dapo", [(0, 0.2), (1000, 0.59999)]))
    assert tables(made)[1].rows[1][1] == "+0.0"


def test_a_baseline_that_has_not_gained_has_no_targets_and_the_title_says_so():
    made = table(result("grpo", [(0, 0.2), (1000, 0.2)]), result("dapo"))
    assert "has not gained" in tables(made)[1].title
    assert tables(made)[1].headings == ("recipe", "difference", "at ⅔ of the\nrollouts")


def test_what_an_update_cost_and_trained_is_shown():
    made = table(result("grpo", updates=20, informative=50))
    shown = dict(zip(tables(made)[0].headings, tables(made)[0].rows[0], strict=True))
    assert (shown["updates"], shown["rollouts\nper update"], shown["groups per\nupdate"]) == ("20", "50", "2.5")
    twice = table(replace(result("grpo", updates=20, informative=50), epochs=2))
    assert twice.rows[0].informative_groups_per_update.mean == 5, "each update of a batch trains all of its groups"


def test_accuracy_by_level_is_at_the_budget_beside_that_before_training():
    arms = [
        result("grpo", levels=((1, 0.5, 0.9), (2, 0.1, 0.3))),
        result("dapo", levels=((1, 0.5, 0.7), (2, 0.1, 0.2))),
    ]
    shown = tables(table(*arms))[-1]
    assert (shown.title, shown.headings) == ("accuracy by level", ("recipe", "1", "2"))
    assert shown.rows == (("before training", "50.0%", "10.0%"), ("grpo", "90.0%", "30.0%"), ("dapo", "70.0%", "20.0%"))


def test_a_level_that_an_arm_lacks_is_left_out():
    made = table(result("grpo", levels=((1, 0.5, 0.9), (2, 0.1, 0.3))), result("dapo", levels=((2, 0.1, 0.2),)))
    assert tables(made)[-1].headings == ("recipe", "2")
    assert len(tables(table(result("grpo", levels=((1, 0.5, 0.9),)), result("dapo")))) == 2


def test_results_of_an_older_study_have_no_levels_and_are_read_all_the_same():
    values = asdict(result("grpo"))
    older = {
        **values,
        "validations": [{k: v for k, v in one.items() if k != "levels"} for one in values["validations"]],
    }
    assert Result.from_dict(json.loads(json.dumps(older))) == result("grpo")
    assert len(tables(table(result("grpo")))) == 2


def test_yields_are_of_what_was_trained_over_all_that_was_generated():
    row = table(result("grpo", [(0, 0.2), (2000, 0.6)], informative=50, signal=80)).rows[0]
    assert row.informative_groups_per_1k_rollouts.mean == 25
    assert row.signal_per_1k_rollouts.mean == 40
    assert row.informative_groups_per_1m_tokens.mean == 2500
    assert row.signal_per_1m_tokens.mean == 4000


@pytest.mark.parametrize(("kind", "amount"), [("tokens", 5000), ("seconds", 0.05), ("rollouts", 500)])
def test_the_cost_may_be_any_of_the_three(kind, amount):
    made = table(result("grpo"), cost=EqualCost(kind, amount))
    assert made.rows[0].accuracy.mean == pytest.approx(0.4)
    assert made.rows[0].against[0].targets[-1].cost.value == pytest.approx(amount)


def test_tuning_is_shown_with_what_it_cost_and_is_no_part_of_the_rows():
    grid = {"a.lr": ("1", "2")}
    tried = [result("grpo", [(0, 0.2), (1000, end)], seed=1000, settings={"a.lr": lr}) for lr, end in
             (("1", 0.3), ("2", 0.5))]  # fmt: skip
    made = table(result("grpo", settings={"a.lr": "2"}), tuned=tried, grid=grid)
    assert [(trial.settings, trial.accuracy, trial.chosen) for trial in made.trials] == [
        ({"a.lr": "1"}, 0.3, False),
        ({"a.lr": "2"}, 0.5, True),
    ]
    assert (made.tuning.arms, made.tuning.rollouts, made.reported.arms) == (2, 2000, 1)
    assert "grpo: lr=2 (tried: 1 30.0%, 2 50.0%)" in notes(made)
    assert notes(made)[-1] == "grpo: its best lr=2 is the highest value tried; a higher one may be better"
    assert values_of(made)["edges"] == [{"recipe": "grpo", "key": "a.lr", "value": "2", "side": "highest"}]


def test_as_json_it_is_all_there():
    made = table(result("grpo"), result("dapo", [(0, 0.2), (1000, 0.5)]))
    values = values_of(made)
    assert values["cost"] == {"kind": "rollouts", "amount": 1000}
    assert values["rows"][1]["accuracy"] == {"mean": 0.5, "half": None}
    assert values["rows"][1]["against"][0]["targets"][-1]["cost"] == {"value": None, "interval": None}


def test_in_markdown_every_row_has_every_column():
    made = table(result("grpo"), result("dapo", [(0, 0.2), (1000, 0.5)]))
    lines = [line for line in in_markdown(made).splitlines() if line.startswith("|")]
    assert [line.count("|") for line in lines] == [13] * 4 + [8] * 4
    assert "not reached" in lines[7]
    assert caption(made) == "at 1,000 rollouts each, 1 seed; 20.0% before training"


def test_a_notebook_shows_every_row_and_nothing_of_a_name_is_markup():
    made = table(result("<b>grpo"), result("dapo"))
    shown = made._repr_html_()
    assert "<b>" not in shown
    assert "&lt;b&gt;grpo" in shown
    assert shown.count("dapo") >= len(tables(made))


def test_the_picture_is_the_mean_of_the_seeds_up_to_the_budget_and_no_further():
    reported = [result("grpo", [(0, 0.2), (1100, end)], seed=seed) for seed, end in ((1, 0.75), (2, 0.97))]
    plot = curves(study("grpo", seeds=2), Results((), tuple(reported)))
    assert [row["cost"] for row in plot.values] == [50 * part for part in range(21)]
    assert plot.values[0] == {"recipe": "grpo", "cost": 0, "accuracy": 0.2, "low": 0.2, "high": 0.2}
    last = plot.values[-1]
    assert last["accuracy"] == pytest.approx(0.2 + (0.86 - 0.2) / 1.1)
    assert last["low"] == 0.0, "two seeds that differ so much say nothing, and no accuracy is below 0"
    assert last["high"] == 1.0
    assert plot.spec()["layer"]


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
    again = make_table(study(seeds=len(accuracies)), Results((), tuple(reported)))
    for one, other in zip(made.rows, again.rows, strict=True):
        assert other.accuracy.mean == pytest.approx(one.accuracy.mean)
        assert other.recipe == one.recipe
    assert made.rows[0].accuracy.mean == made.rows[1].accuracy.mean
    for one in made.rows[0].against[0].targets:
        assert one.ratio.value == 1, "the baseline reaches its own accuracy"
        assert one.cost.value <= BUDGET.amount
