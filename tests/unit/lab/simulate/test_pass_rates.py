"""Every way saved data can say a pass rate is understood; what says none is refused with the row and the columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import write_records

from goldilocks.core import ListSource
from goldilocks.lab.simulate import PassRates, mixture, read_pass_rates
from goldilocks.lab.simulate.pass_rates import DEFAULT_TOKENS, DIFFICULTIES, LONGEST, SHORTEST, interpret


def verl_rows(step: int, **scores: list[float]) -> list[dict[str, Any]]:
    return [
        {"input": name, "output": "x" * 40, "gts": "4", "score": score, "step": step}
        for name, values in scores.items()
        for score in values
    ]


@pytest.mark.parametrize("extension", ["jsonl", "parquet"])
def test_a_pass_rate_a_row_is_read_as_it_is(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"rates.{extension}"
    write_records(
        path, [{"prompt": "a", "pass_rate": 0.25, "tokens": 70}, {"prompt": "b", "pass_rate": 1, "tokens": 9}]
    )
    data = read_pass_rates(path)
    assert (data.contents, data.pass_rate.tolist(), data.tokens.tolist()) == (("a", "b"), [0.25, 1.0], [70.0, 9.0])


def test_rewards_a_row_become_the_share_of_passes_also_as_lists_of_a_csv(tmp_path: Path) -> None:
    path, table = tmp_path / "rewards.parquet", tmp_path / "rewards.csv"
    write_records(path, [{"rewards": [-1.0, 1.0, 1.0, 0.5]}, {"rewards": [0.1]}])
    data = read_pass_rates(path)
    assert data.pass_rate.tolist() == [0.75, 0.0]
    assert data.tokens.tolist() == [DEFAULT_TOKENS, DEFAULT_TOKENS]
    table.write_text('prompt,rewards\nx,"[0, 1, 1, 1]"\ny,"[0]"\n')
    assert read_pass_rates(table).pass_rate.tolist() == [0.75, 0.0]


def test_a_directory_of_verl_dumps_is_read_as_it_is(tmp_path: Path) -> None:
    write_records(tmp_path / "1.jsonl", verl_rows(1, easy=[1.0, 1.0], hard=[-1.0, -1.0]))
    write_records(tmp_path / "2.jsonl", verl_rows(2, hard=[-1.0, 1.0]))
    data = read_pass_rates(tmp_path)
    assert data.contents == ("easy", "hard")
    assert data.pass_rate.tolist() == [1.0, 0.25]
    assert data.tokens.tolist() == [10.0, 10.0]  # 40 characters


def test_a_v1_dump_whose_uid_is_the_samples_is_grouped_by_its_prompt(tmp_path: Path) -> None:
    rows = [{**row, "uid": f"u_{place}_0"} for place, row in enumerate(verl_rows(1, a=[0.0, 1.0], b=[1.0]))]
    write_records(tmp_path / "1.jsonl", rows)
    assert read_pass_rates(tmp_path / "1.jsonl").pass_rate.tolist() == [0.5, 1.0]


def test_a_prompt_that_is_a_list_of_messages_names_its_rollouts() -> None:
    chat = [{"role": "user", "content": "2+2="}]
    data = interpret([{"prompt": chat, "reward": 1.0}, {"prompt": list(chat), "reward": 0.0}])
    assert data.pass_rate.tolist() == [0.5]
    assert data.contents == (chat,)


def test_a_counted_length_goes_before_a_guessed_one() -> None:
    assert interpret([{"input": "a", "output": "x" * 400, "score": 1, "response_length": 30}]).tokens.tolist() == [30.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"pass_rate": 0.5}, {"pass_rate": 1.5}], r"row 2: pass_rate=1\.5 is not accepted: between 0 and 1"),
        ([{"pass_rate": -0.1}], r"row 1: pass_rate=-0\.1 is not accepted"),
        ([{"pass_rate": "half"}], "row 1: pass_rate='half' is not accepted: a finite number"),
        ([{"pass_rate": float("nan")}], "row 1: pass_rate=nan is not accepted"),
        ([{"pass_rate": 0.5}, {"rate": 1}], "row 2: no value in column 'pass_rate'; there are: rate"),
        ([{"rewards": []}], r"row 1: rewards=\[\] is not accepted"),
        ([{"rewards": [1, None]}], "row 1: no value in column 'rewards'"),
        ([{"rewards": "0 1"}], "row 1: rewards='0 1' is not accepted"),
        ([{"rewards": [1, "x"]}], "row 1: rewards='x' is not accepted: a finite number"),
        ([{"score": 1.0, "answer": "4"}], "no columns that say a pass rate; .* there are: score, answer"),
        ([{"prompt": "a"}], "no columns that say a pass rate; .* there are: prompt"),
        ([{"prompt": None, "score": 1.0}], "row 1: no value in column 'prompt'"),
        ([{"pass_rate": 0.5, "tokens": -3}], r"row 1: tokens=-3\.0 is not accepted"),
        ([{"pass_rate": 0.5, "lengths": [8, -3]}], r"row 1: lengths=-3\.0 is not accepted: numbers of tokens"),
    ],
)
def test_rows_that_say_no_pass_rate_are_refused(rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interpret(rows)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    path.write_text(json.dumps({"pass_rate": 2}) + "\n")
    with pytest.raises(ValueError, match=r"rates\.jsonl: row 1: pass_rate=2\.0"):
        read_pass_rates(path)


def test_the_mixture_is_what_its_bands_say() -> None:
    data = mixture()
    assert len(data) == sum(prompts for _, prompts, *_ in DIFFICULTIES) == 2_000
    assert len(set(ListSource(data.contents).keys().tolist())) == 2_000
    assert (data.tokens[0], data.tokens[-1]) == (LONGEST, SHORTEST)
    assert (data.tokens[data.pass_rate.argsort()][:-1] >= data.tokens[data.pass_rate.argsort()][1:]).all()
    start = 0
    for _, prompts, lowest, highest in DIFFICULTIES:
        rates = data.pass_rate[start : start + prompts]
        assert (rates.min(), rates.max()) == (lowest, highest)
        start += prompts


def dumped(path: Path, rates: list[float], *, filtered: bool) -> None:
    """Write two steps of dumps with eight answers to each prompt; ``filtered``: only groups whose scores differ."""
    rng = np.random.default_rng(0)
    for step in (1, 2):
        groups = {f"prompt {place}": rng.binomial(1, rate, 8).tolist() for place, rate in enumerate(rates)}
        kept = {name: scores for name, scores in groups.items() if not filtered or len(set(scores)) > 1}
        write_records(path / f"{step}.jsonl", verl_rows(step, **kept))


SPREAD = np.linspace(0.02, 0.98, 60).tolist()


def test_dumps_without_a_group_all_right_or_all_wrong_are_of_a_run_that_dropped_them(tmp_path: Path) -> None:
    dumped(tmp_path / "all", SPREAD, filtered=False)
    dumped(tmp_path / "kept", SPREAD, filtered=True)
    assert len(read_pass_rates(tmp_path / "all")) == 60
    with pytest.raises(ValueError, match=r"kept: none of \d+ groups is all right .* take a run that filtered nothing"):
        read_pass_rates(tmp_path / "kept")


def test_rewards_of_informative_prompts_alone_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"{one}", "rewards": [1] * right + [0] * (8 - right)} for one in range(20) for right in (1, 7)]
    with pytest.raises(ValueError, match="none of 40 groups is all right or all wrong"):
        interpret(rows)
    assert len(interpret([*rows, {"prompt": "easy", "rewards": [1] * 8}])) == 41


def test_prompts_of_middling_difficulty_alone_are_not_taken_for_those_of_a_filtered_run() -> None:
    middling = [{"rewards": [1] * right + [0] * (16 - right)} for right in (6, 7, 8, 9, 10) * 40]
    assert len(interpret(middling)) == 200
    assert len(interpret([{"pass_rate": rate} for rate in np.linspace(0.001, 0.999, 5_000).tolist()])) == 5_000


def test_dumps_beside_metrics_of_dropped_groups_are_refused(tmp_path: Path) -> None:
    dumped(tmp_path / "rollouts", [0.5, 0.1, 0.0, 1.0], filtered=False)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "data": {"train/filtered_prompts_ratio": 1.0}}) + "\n")
    assert len(read_pass_rates(tmp_path / "rollouts")) == 4
    metrics.write_text(json.dumps({"step": 1, "data": {"filter/dropped/too_hard": 3}}) + "\n")
    for path in (tmp_path / "rollouts", tmp_path / "rollouts" / "2.jsonl"):
        with pytest.raises(
            ValueError, match=r"the run dropped groups \(.*metrics\.jsonl has filter/dropped/too_hard\)"
        ):
            read_pass_rates(path)


def test_what_differs_between_the_answers_to_a_prompt_is_no_column_of_it() -> None:
    rows = [{**row, "level": 3, "pred": place} for place, row in enumerate(verl_rows(1, a=[0.0, 1.0], b=[1.0]))]
    assert set(interpret(rows).columns) == {"input", "output", "gts", "step", "level"}


def test_drawn_rates_are_those_that_may_be_behind_the_answers() -> None:
    rng = np.random.default_rng(0)
    passes = rng.binomial(8, 0.1, 2_000)
    alike = PassRates(tuple(range(2_000)), passes / 8, np.ones(2_000), trials=np.full(2_000, 8.0)).drawn(rng)
    assert alike.pass_rate.std() < 0.03 < (passes / 8).std(), "they differed by chance"
    apart = PassRates(tuple(range(2_000)), np.repeat([0.0, 1.0], 1_000), np.ones(2_000), trials=8.0).drawn(rng)
    assert apart.pass_rate[:1_000].mean() < 0.01 < 0.99 < apart.pass_rate[1_000:].mean()
