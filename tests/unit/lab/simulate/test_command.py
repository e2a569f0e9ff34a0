"""``goldilocks simulate`` as a user types it: the tables, the JSON object, and one clear line for every mistake."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import write_records

from goldilocks.cli import main
from goldilocks.config.recipes import names
from goldilocks.core.allocators import Fixed
from goldilocks.core.beliefs import Beliefs
from goldilocks.lab.simulate.run import figure, percent


class Sixteen(Fixed):
    """An allocator of a user's own."""

    def __init__(self, n: int = 16) -> None:
        super().__init__(n)


@pytest.fixture
def rates(tmp_path: Path) -> str:
    path = tmp_path / "rates.jsonl"
    write_records(path, [{"prompt": f"p{i}", "pass_rate": i / 50, "tokens": 90 - i} for i in range(51)])
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", "--rollouts", "500", "--target-groups", "8", *words]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(simulated(capsys, "--json", *words))
    return loaded


def test_without_a_file_or_a_policy_every_policy_meets_the_mixture(capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(capsys)
    assert [one["policy"] for one in result["policies"]] == names()
    assert result["prompts"] == 2_000
    assert {one["rollouts"] for one in result["policies"]} == {500}


def test_the_tables_show_what_the_json_holds(capsys: pytest.CaptureFixture[str], rates: str) -> None:
    words = ("--pass-rates", rates, "--policy", "dapo", "--policy", "contrast", "--failure-rate", "0.05")
    result = as_json(capsys, *words)
    lines = [line.split() for line in simulated(capsys, *words).splitlines()]
    used = [name for name in result["policies"][0]["token_share"] if any(
        one["token_share"][name] for one in result["policies"])]  # fmt: skip
    assert ["policy", "rollouts", "tokens", *used, "at", "end"] in lines
    for one in result["policies"]:
        assert [line for line in lines if line[:1] == [one["policy"]]] == [
            [
                one["policy"],
                figure(one["informative_groups_per_1k_rollouts"]),
                figure(one["signal_per_1k_rollouts"]),
                figure(one["informative_groups_per_1m_tokens"]),
                figure(one["signal_per_1m_tokens"]),
                str(one["batches"]),
                figure(one["engine_steps_per_batch"], 0),
                percent(one["hard_prompts_reached"]),
            ],
            [
                one["policy"],
                f"{one['rollouts']:,}",
                f"{one['tokens'] / 1e6:.1f}M",
                *(percent(one["token_share"][name]) for name in used),
                figure(one["mean_pass_rate"], 3),
            ],
        ]
        assert sum(one["token_share"].values()) == pytest.approx(1.0)


def test_a_key_of_the_recipes_is_set_for_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "grpo", "--policy", "contrast")
    plain, set_to_twelve = as_json(capsys, *words), as_json(capsys, *words, "--set", "adaptive_rollout.max_n=12")
    assert plain["policies"][0] == set_to_twelve["policies"][0], "grpo does not read it"
    assert plain["policies"][1] != set_to_twelve["policies"][1]


def test_settings_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "contrast", "--set", "adaptive_rollout.max_n=12", "--set", "adaptive_rollout.stop=balanced")
    both = as_json(capsys, *words, "--set", "adaptive_rollout.max_train_n=4")
    untrimmed = as_json(capsys, *words, "--set", "adaptive_rollout.max_train_n=none")
    assert both["policies"][0]["token_share"]["trimmed"] > 0
    assert untrimmed["policies"][0]["token_share"]["trimmed"] == 0


def test_a_part_of_the_users_own_takes_the_place_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    named, five = f"goldilocks.allocator={__name__}:Sixteen", "goldilocks.allocator_kwargs.n=5"
    own = as_json(capsys, "--policy", "dapo", "--set", named, "--set", five)
    ours = as_json(capsys, "--policy", "dapo", "--set", "actor_rollout_ref.rollout.n=5")
    assert own["policies"] == ours["policies"]


def test_settings_are_judged_together(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [("min_n", 40), ("mean_n", 41), ("max_n", 42)]
    words = [word for name, n in sizes for word in ("--set", f"goldilocks.allocator_kwargs.{name}={n}")]
    assert as_json(capsys, "--policy", "knapsack", *words)["policies"][0]["rollouts"] == 500


class Needy(Fixed):
    """It has no default."""

    def __init__(self, n: int) -> None:
        super().__init__(n)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "tompson"], ", or a .yaml file (did you mean 'thompson'?)"),
        (["--rollouts", "-3"], "rollouts=-3 is not accepted"),
        (["--seed", "-3"], "seed=-3 is not accepted"),
        (["--slots", "0"], "slots=0 is not accepted"),
        (["--failure-rate", "1.5"], "failure_rate=1.5 is not accepted"),
        (["--improvement", "nan"], "improvement=nan is not accepted"),
        (["--lift", "level"], "--lift='level' is not accepted: COLUMN=X, such as level=0.05"),
        (["--lift", "level=0.1"], "--lift='level' is not accepted: a column of the data"),
        (["--target-groups", "0"], "goldilocks: target_groups=0 is not accepted: 1 or more"),
        (["--gen-batch-size", "0"], "gen_batch_size=0 is not accepted"),
        (
            ["--target-groups", "2001", "--no-repeat"],
            "target_groups (data.train_batch_size)=2001 is not accepted: at most 2000:",
        ),
        (["--set", "actor_rollout_ref.rollout.n=[1"], "rollout.n=[1' is not accepted: a list is written [a,b]"),
        (["--policy", "dapo", "--set", "goldilocks.allocator_kwargs.n=many"], "n='many' is not accepted: a whole"),
        (["--policy", "dapo", "--set", "goldilocks.allocator_kwargs.n=2.5"], "n=2.5 is not accepted: a whole number"),
        (["--policy", "thompson", "--set", "goldilocks.selector_kwargs.target=true"], "target=True is not accepted: a"),
        (["--policy", "knapsack", "--set", "goldilocks.allocator_kwargs.max_m=4"], "(did you mean 'max_n'?)"),
        (["--set", "seed"], "--set='seed' is not accepted: KEY=VALUE with a key of the recipes"),
        (["--set", "engine.slots=4"], "--set='engine.slots=4' is not accepted"),
        (["--set", "adaptive_rolout.max_n=9"], "(did you mean 'adaptive_rollout.max_n'?)"),
        (["--set", "adaptive_rollout.max_n=many"], "adaptive_rollout.max_n='many' is not accepted: a whole number"),
        (["--set", "goldilocks.prior=oracle"], "goldilocks.prior='oracle' is not accepted: flat or strata; oracle"),
        (["--set", "batch_filter.enable=true"], "batch_filter.enable=True is not accepted: false"),
        (["--policy", "dapo", "--set", f"goldilocks.allocator={__name__}:Needy"], ":Needy' cannot be made: TypeError"),
        (["--pass-rates", __file__], ".py: unknown extension '.py'"),
    ],
)
def test_a_mistake_gets_one_line(refused: Callable[[list[str]], str], words: list[str], message: str) -> None:
    assert message in refused(["simulate", *words])


class Interrupted(Fixed):
    """The user presses Ctrl-C while this decides."""

    def first(self, rows: np.ndarray, beliefs: Beliefs) -> Sequence[int]:
        signal.raise_signal(signal.SIGINT)
        return super().first(rows, beliefs)


def test_an_interrupt_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--policy", "grpo", "--set", f"goldilocks.allocator={__name__}:Interrupted"]) == 130
    assert capsys.readouterr() == ("", "goldilocks: interrupted\n")


def test_without_a_terminal_a_long_simulation_says_now_and_then_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr("goldilocks.launch.live.EVERY_S", 0.0)
    assert main(["simulate", "--rollouts", "100", "--policy", "grpo", "--policy", "dapo", "--json"]) == 0
    said = [line.split() for line in capsys.readouterr().err.splitlines()]  # grpo · policy 0/2
    assert [words[:4:3] for words in said] == [["grpo", "0/2"], ["dapo", "1/2"]]


def test_a_key_without_effect_is_said_with_the_policy_that_does_not_read_it(capsys, caplog, tmp_path):
    file = tmp_path / "rates.jsonl"
    file.write_text("".join(f'{{"prompt": "p{row}", "pass_rate": 0.5, "level": {row % 2}}}\n' for row in range(64)))
    keys = ["--set", 'goldilocks.strata.columns=["level"]', "--rollouts", "256", "--target-groups", "8"]
    assert main(["simulate", "--pass-rates", str(file), "--policy", "dapo", "--policy", "dapo_strata", *keys]) == 0
    said = [record.message for record in caplog.records if "no effect" in record.message]
    assert [line.partition(":")[0] for line in said] == ["dapo"]
