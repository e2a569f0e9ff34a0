"""What strata know of prompts whose pass rates are known, and that they know nothing where nothing can be known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from goldilocks.cli import main
from goldilocks.lab.simulate import PassRates, read_pass_rates
from goldilocks.lab.simulate.strata import judge
from goldilocks.runs.records import write_records

RATES = (0.97, 0.8, 0.5, 0.2, 0.03)  # by how many digits a sum has


def sums(*, told: bool = True, prompts: int = 300, answers: int = 8, rates: tuple[float, ...] = RATES) -> PassRates:
    """Sums whose pass rate follows from their digits; the column says how many, and where ``told`` the text does."""
    rng = np.random.default_rng(0)
    digits = rng.integers(1, len(rates) + 1, prompts)
    passes = rng.binomial(answers, np.array(rates)[digits - 1])
    texts = tuple(f"Add {'7' * one if told else 'words'} and {place}x." for place, one in enumerate(digits.tolist()))
    columns = {"digits": digits.tolist(), "name": [f"n{one % 9}" for one in range(prompts)]}
    return PassRates(texts, passes / answers, np.ones(prompts), columns=columns, trials=np.full(prompts, answers))


def test_where_a_column_or_the_text_tells_the_difficulty_strata_explain_most_and_help() -> None:
    for columns in (["digits"], []):
        found = judge(sums(), columns)
        assert 0.85 < found.explained < 1.1, "what is left is chance"
        assert found.signal > 1.3
        assert found.helps
    assert judge(sums(), ["digits"]).strata == 5


@pytest.mark.parametrize("columns", [["name"], []], ids=["column", "text"])
def test_where_nothing_tells_it_strata_explain_nothing_and_do_not_help(columns: list[str]) -> None:
    found = judge(sums(told=False), columns)
    assert abs(found.explained) < 3 * found.error
    assert not found.helps


def test_prompts_that_differ_by_chance_alone_leave_nothing_to_explain() -> None:
    found = judge(sums(rates=(0.5, 0.5)), ["digits"])
    assert found.explained < 0.05
    assert not found.helps


def test_strata_that_tell_prompts_apart_and_find_none_that_teach_more_do_not_help() -> None:
    found = judge(sums(rates=(0.15, 0.85), answers=64), ["digits"])
    assert found.explained > 0.8
    assert found.signal == pytest.approx(1, abs=0.05)
    assert not found.helps


def test_prompts_with_one_answer_are_left_out_and_too_few_others_are_refused() -> None:
    prompts = sums(prompts=300)
    some = PassRates(prompts.contents, prompts.pass_rate, prompts.tokens, columns=prompts.columns,
                     trials=np.where(np.arange(300) < 150, 8, 1))  # fmt: skip
    assert judge(some, ["digits"]).helps
    with pytest.raises(ValueError, match="FILE='0 prompts with several answers' is not accepted: 100 or more"):
        judge(sums(answers=1), ["digits"])


def test_the_command_judges_a_directory_of_dumps_by_columns_and_by_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = sums(told=False)
    for step in range(8):
        rows = [
            {"input": text, "output": "", "gts": "", "score": float(step < 8 * rate), "step": step, "digits": digits}
            for text, rate, digits in zip(prompts.contents, prompts.pass_rate, prompts.columns["digits"], strict=True)
        ]
        write_records(tmp_path / f"{step + 1}.jsonl", rows)
    assert main(["strata", str(tmp_path), "--columns", "digits"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["300", "prompts,"]
    assert (lines[3][:2], lines[3][-1]) == (["digits", "5"], "yes")
    assert (lines[4][0], lines[4][-1]) == ("text", "no")
    assert main(["strata", str(tmp_path), "--columns", "level"]) == 2
    assert "goldilocks.strata.columns='level' is not accepted: a column of the data:" in capsys.readouterr().err


def test_the_answers_behind_a_pass_rate_are_counted_and_the_names_of_prompts_are_not_read(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", [{"prompt": "a", "rewards": [0, 1, 1]}, {"prompt": "b", "rewards": [1]}])
    write_records(tmp_path / "b.jsonl", [{"uid": "a", "score": 1.0}, {"uid": "a", "score": 0.0}])
    write_records(tmp_path / "c.jsonl", [{"pass_rate": 0.5}])
    found = [read_pass_rates(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    assert [np.asarray(one.trials).tolist() for one in found] == [[3, 1], [2], [1000]]
    assert [one.readable for one in found] == [True, False, False]
