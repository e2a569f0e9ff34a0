"""GSM8K from parquet files, and what counts as a right answer."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from goldilocks.tasks.gsm8k import INSTRUCTION, Gsm8k, final_answer

ROWS = [
    {
        "question": f"Ann has {n} apples and eats one. How many are left?",
        "answer": f"{n}-1=<<{n}-1={n - 1}>>.\n#### {n - 1:,}",
    }
    for n in range(2, 3000, 60)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS[:40]), tmp_path / "train-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[40:]), tmp_path / "test-00000-of-00001.parquet")
    return tmp_path


def test_a_folder_is_read_by_its_published_splits(folder):
    task = Gsm8k(str(folder))
    train, val = task.problems("train", 100, 0), task.problems("val", 100, 0)
    assert (len(train), len(val)) == (40, len(ROWS) - 40)
    assert train[0].question == ROWS[0]["question"] + " " + INSTRUCTION
    assert val[-1].answer == str(int(ROWS[-1]["answer"].split("#### ")[1].replace(",", "")))
    assert {problem.difficulty for problem in train} == {1.0}


def test_a_single_file_is_divided_by_content(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "all.parquet")
    task = Gsm8k(str(tmp_path / "all.parquet"))
    train, val = ({problem.question for problem in task.problems(split, 100, 0)} for split in ("train", "val"))
    assert not train & val
    assert len(train | val) == len(ROWS)


@pytest.mark.parametrize(
    "answer", ["#### 1234", "#### 1,234", "first #### 5\nno, #### 1234", "\\boxed{1234}", "####1234.0"]
)
def test_the_number_counts_however_it_is_written(answer):
    assert Gsm8k().grade(answer, "1234", {})["acc"] == 1.0


@pytest.mark.parametrize(
    "answer", ["1234", "", "#### 1235", "#### 9^9^9^9^9", "#### 10**10**10**10", "#### " + "1" * 5000]
)
def test_anything_else_is_wrong_and_graded_at_once(answer):
    assert Gsm8k().grade(answer, "1234", {})["acc"] == 0.0


def test_the_last_marked_answer_is_final():
    assert final_answer("#### 1\n#### 2") == "2"
    assert final_answer("no mark") is None


def test_missing_files_and_columns_are_named(tmp_path):
    with pytest.raises(ValueError, match="that exists"):
        Gsm8k(str(tmp_path / "none")).problems("train", 1, 0)
    with pytest.raises(ValueError, match=r"a file named \*test\* that ends in \.parquet or \.jsonl"):
        Gsm8k(str(tmp_path)).problems("val", 1, 0)
    pq.write_table(pa.table({"question": ["?"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="columns question and answer; there are question"):
        Gsm8k(str(tmp_path / "x.parquet")).problems("train", 1, 0)


def test_json_lines_are_read_as_published(tmp_path):
    for name, question in (("train", "How many?"), ("test", "How much?")):
        row = {"question": question, "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n\n")
    task = Gsm8k(str(tmp_path))
    (problem,) = task.problems("val", 5, seed=0)
    assert problem.question.startswith("How much?")
    assert (problem.answer, problem.difficulty) == ("4", 1.0)
    assert len(Gsm8k(str(tmp_path / "train.jsonl")).problems("train", 5, 0)) <= 1
