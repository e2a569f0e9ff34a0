"""Advice follows the prompts: strata where columns or texts tell them apart, DAPO where they are alike."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from run_files import write_records

from goldilocks.cli import main
from goldilocks.lab import Interval
from goldilocks.lab.simulate import PassRates, read_pass_rates
from goldilocks.lab.simulate.advise import COSTS, PASSES, Candidate, Shares, advice, recipes, share, telling_columns

RATES = (0.97, 0.4, 0.02, 0.0, 0.0)  # by how many digits a sum has


def sums(path: Path, *, rates: tuple[float, ...] = RATES, prompts: int = 120, answers: int = 8) -> Path:
    """Write sums whose pass rate follows from their digits, which a column says."""
    rng = np.random.default_rng(0)
    write_records(path, [
        {"prompt": f"Add {place} and words.", "rewards": rng.binomial(1, rates[one - 1], answers).tolist(),
         "tokens": 64, "digits": int(one), "long": f"{one} digits", "name": f"n{place % 9}", "place": place}
        for place, one in enumerate(rng.integers(1, len(rates) + 1, prompts).tolist())
    ])  # fmt: skip
    return path


def said(capsys: pytest.CaptureFixture[str], file: Path, *words: str) -> list[str]:
    assert main(["advise", str(file), "--seeds", "3", "--target-groups", "8", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_where_a_column_tells_the_prompts_apart_frontier_with_its_strata_is_advised(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("goldilocks.launch.live.EVERY_S", 0.0)
    assert main(["advise", str(sums(tmp_path / "sums.jsonl")), "--seeds", "3", "--target-groups", "8"]) == 0
    printed = capsys.readouterr()
    *table, sentence, _, train, verl = printed.out.splitlines()
    assert printed.err.startswith("seed 1: dapo · simulation 0/18\n"), "a log is told how far it is"
    assert table[0].endswith("sums.jsonl: 120 prompts, mean pass rate 0.260")
    assert sentence.startswith("use frontier with strata by digits: 0.")
    assert "of dapo's tokens for the same informative groups in a first pass, 0." in sentence
    assert shlex.split(train) == ["goldilocks", "train", "frontier", "goldilocks.strata.columns=[digits]"]
    assert "'+goldilocks.strata.columns=[digits]'" in verl
    assert [line.split("  ")[0] for line in table[5:-1]] == [
        "grpo", "adaptive", "dapo_strata with strata by digits", "frontier with strata by digits",
        "frontier with strata by text",
    ]  # fmt: skip


def test_where_prompts_are_alike_the_advice_is_to_stay_with_dapo(tmp_path, capsys):
    """About half of the prompts have 0 right of 8: by chance, which is not taken for difficulty."""
    lines = said(capsys, sums(tmp_path / "alike.jsonl", rates=(0.08,)), "--columns", "name")
    assert lines[-4].startswith("prompts are alike: stay with dapo (")
    assert lines[-2] == "goldilocks train dapo"


def test_columns_are_found_by_what_they_tell_and_those_of_the_answers_are_left_out(tmp_path):
    prompts = read_pass_rates(sums(tmp_path / "sums.jsonl"))
    assert telling_columns(prompts) == ["digits"], "long repeats digits, name tells nothing, place has too many values"
    leaked = {**prompts.columns, "right": (prompts.pass_rate * 8).tolist(), "step": prompts.columns["digits"]}
    assert telling_columns(PassRates(prompts.contents, prompts.pass_rate, prompts.tokens, columns=leaked)) == ["digits"]


def test_strata_are_by_columns_and_by_text_where_there_are_any():
    names = ["dapo", "grpo", "adaptive"]
    assert [arm.name for arm in recipes(["level", "type"], readable=True)] == [
        *names, "dapo_strata with strata by level and type", "frontier with strata by level and type",
        "frontier with strata by text",
    ]  # fmt: skip
    assert [arm.name for arm in recipes([], readable=False)] == [*names, "dapo_strata", "frontier"]


def test_a_share_is_of_the_costs_of_the_groups_that_both_have():
    dapo = np.array([[0, 10, 20], [0, 100, 200], [0, 1000, 3000], [0, 50, 100]])
    half = np.array([[0, 20], [0, 100], [0, 1000], [0, 200]])
    assert share(half, dapo, 200) == pytest.approx([0.5, 1 / 3, 2])
    assert share(half, dapo, 100) == pytest.approx([0.5, 0.5, 2]), "ten groups each, read off between two batches"
    assert share(dapo, half, 100) == pytest.approx([2, 2, 0.5]), "of a dearer recipe, the groups that it has"


def shares(first: Interval, three: Interval) -> Shares:
    return {(during, cost): one for during, one in zip(PASSES, (first, three), strict=True) for cost in COSTS}


@pytest.mark.parametrize(
    ("first", "three", "stay"),
    [
        (Interval(0.8, 0.1), Interval(0.7, 0.1), False),
        (Interval(1.0, 0.1), Interval(0.7, 0.1), False),
        (Interval(0.8, 0.3), Interval(0.9, 0.1), True),
        (Interval(0.96, 0.01), Interval(0.97, 0.01), True),
    ],
    ids=["both", "three passes alone", "the interval reaches 1", "less than a twentieth"],
)
def test_a_recipe_is_advised_if_its_interval_is_below_1_and_its_gain_worth_a_change(first, three, stay):
    frontier, grpo, adaptive = Candidate("frontier", (), "text"), Candidate("grpo"), Candidate("adaptive")
    level, cheap = shares(Interval(1.0, 0.0), Interval(1.0, 0.0)), shares(Interval(0.5, 0.1), Interval(0.5, 0.1))
    arm, sentence = advice({grpo: level, adaptive: cheap, frontier: shares(first, three)})  # cheap: in groups of two
    assert arm == (Candidate("dapo") if stay else frontier)
    assert sentence.startswith(
        "prompts are alike: stay with dapo (frontier with strata by text" if stay else "use fron"
    )
    assert (
        f"{first.mean:.2f} ({first.mean - first.half:.2f}–{first.mean + first.half:.2f}) of dapo's tokens" in sentence
    )


@pytest.mark.parametrize(
    "arm", [Candidate("frontier", ("level", "type"), "level and type"), *recipes([], readable=False)]
)
def test_the_words_for_verl_are_keys_that_verl_takes(arm):
    words = shlex.split(arm.commands().splitlines()[1].partition("… ")[2])
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words)
    assert config.trainer.v1.trainer_mode == "goldilocks"
    assert config.algorithm.filter_groups.enable is (arm.recipe not in ("grpo", "adaptive"))
    if arm.columns:
        assert (config.goldilocks.selector, config.goldilocks.strata.columns) == ("frontier", ["level", "type"])


def test_a_sample_of_the_prompts_keeps_what_belongs_together(tmp_path):
    prompts = read_pass_rates(sums(tmp_path / "sums.jsonl"))
    some = prompts.some(50)
    rows = some.columns["place"]
    assert (len(some), rows) == (50, sorted(set(rows)))
    assert some.pass_rate.tolist() == prompts.pass_rate[rows].tolist()
    assert some.contents == tuple(f"Add {row} and words." for row in rows)
    assert prompts.some(120) is prompts


@pytest.mark.parametrize(
    ("rates", "words", "message"),
    [
        (RATES, ["--seeds", "1"], "--seeds=1 is not accepted: 2 or more"),
        (RATES, ["--n", "1"], "--n=1 is not accepted: 2 or more"),
        (RATES, ["--columns", "topic"], "='topic' is not accepted: a column of the data: "),
        (RATES, ["--target-groups", "512"], "=512 is not accepted: fewer, or more prompts: dapo fills no batch with"),
        ((0.01,), ["--target-groups", "24"], "fewer, or more prompts: dapo_strata with strata by text fills no batch"),
        ((0.0,), [], "pass_rate=0.0 is not accepted: more than 0 and less than 1 as the mean of all prompts"),
    ],
)
def test_what_gives_no_advice_is_refused_with_the_reason(tmp_path, refused, rates, words, message):
    assert message in refused(["advise", str(sums(tmp_path / "sums.jsonl", rates=rates)), *words])
