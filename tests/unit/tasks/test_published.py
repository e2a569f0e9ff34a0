"""GSM8K and MATH from files as they are published, and what counts as a right answer."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from goldilocks.tasks.published import Gsm8k, Math

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
    assert train[0].question == ROWS[0]["question"] + " " + Gsm8k.instruction
    assert val[-1].answer == str(int(ROWS[-1]["answer"].split("#### ")[1].replace(",", "")))
    assert {problem.difficulty for problem in train} == {1.0}


def test_a_single_file_is_divided_by_content(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "all.parquet")
    task = Gsm8k(str(tmp_path / "all.parquet"))
    train, val = ({problem.question for problem in task.problems(split, 100, 0)} for split in ("train", "val"))
    assert not train & val
    assert len(train | val) == len(ROWS)


RIGHT = ["#### 1234", "#### 1,234", "first #### 5\nno, #### 1234", "\\boxed{1234}", "####1234.0"]
WRONG = ["1234", "", "#### 1235", "#### 9^9^9^9^9", "#### 10**10**10**10", "#### " + "1" * 5000]


@pytest.mark.parametrize("answer", RIGHT + WRONG)
def test_the_number_counts_however_it_is_written_and_anything_else_is_wrong_and_graded_at_once(answer):
    assert Gsm8k().grade(answer, "1234", {})["acc"] == float(answer in RIGHT)


def test_missing_files_and_columns_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"--source='.*none' is not accepted: a file, or a folder"):
        Gsm8k(str(tmp_path / "none")).problems("train", 1, 0)
    with pytest.raises(ValueError, match=r"a file named \*test\*, that ends in \.parquet, \.jsonl, \.json"):
        Gsm8k(str(tmp_path)).problems("val", 1, 0)
    pq.write_table(pa.table({"question": ["?"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="columns question and answer; there are question"):
        Gsm8k(str(tmp_path / "x.parquet")).problems("train", 1, 0)


def test_json_lines_are_read_as_published(tmp_path):
    for name, question in (("train", "How many?"), ("test", "How much?")):
        row = {"question": question, "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n\n")
    (problem,) = Gsm8k(str(tmp_path)).problems("val", 5, seed=0)
    assert problem.question.startswith("How much?")
    assert (problem.answer, problem.difficulty) == ("4", 1.0)
    assert len(Gsm8k(str(tmp_path / "train.jsonl")).problems("train", 5, 0)) <= 1


@pytest.fixture
def competition(tmp_path: Path) -> Path:
    """MATH in the forms in which it is published: the solutions' own boxes, and MATH-500's answers."""
    train = [
        {
            "problem": "What is $1+1$?",
            "level": "Level 1",
            "type": "Counting & Probability",
            "solution": "So \\boxed{2}.",
        },
        {"problem": "Halve $1$.", "answer": "\\frac{1}{2}", "difficulty": 5.0, "type": "Prealgebra"},
        {"problem": "What is $2+2$?", "answer": "4", "difficulty": 2.0, "type": "Algebra"},
        {"problem": "Which?", "answer": None, "difficulty": 2.0, "type": "Algebra"},
    ]
    test = [
        {"problem": "What is $2+2$?", "answer": "4", "difficulty": 2.0, "unique_id": "test/algebra/1.json"},
        {"problem": "Which?", "answer": "E", "level": 3, "subject": "Counting & Probability"},
    ]
    (tmp_path / "train.json").write_text(json.dumps(train))
    (tmp_path / "test500.json").write_text(json.dumps(test))
    return tmp_path


def test_math_has_levels_and_subjects_and_trains_no_test_problem(competition, caplog):
    task = Math(str(competition))
    train, val = (task.problems(split, None, 0) for split in ("train", "val"))
    assert [(one.answer, one.extra["level"], one.extra["type"]) for one in train] == [
        ("2", "1", "counting_and_probability"),
        ("\\frac{1}{2}", "5", "prealgebra"),
    ]
    assert "0 train problems have no answer, and 2 are test problems: left out" in caplog.text
    assert [(one.extra["level"], one.extra["type"]) for one in val] == [
        ("2", "algebra"),
        ("3", "counting_and_probability"),
    ]
    assert train[0].question.endswith("within \\boxed{}.")


def test_an_answer_that_is_published_as_a_number_is_compared_as_text(tmp_path):
    (tmp_path / "test.json").write_text('[{"problem": "What is $1-1$?", "answer": 0}]')
    (problem,) = Math(str(tmp_path)).problems("val", None, 0)
    assert problem.answer == "0"


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("so \\boxed{\\frac{14}{3}}", "\\frac{14}{3}"),  # braces in braces
        ("\\boxed{\\dfrac{14}{3}}", "\\frac{14}{3}"),
        ("\\boxed{14/3}", "\\frac{14}{3}"),
        ("\\boxed{4.5}", "\\frac{9}{2}"),
        ("first \\boxed{1}, no: \\boxed{2}", "2"),  # two boxes: the last counts
        ("\\boxed{\\boxed{2}} and {more}", "2"),
        ("\\boxed{(3,\\pi/2)}", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}"),
        ("\\boxed{Evelyn}", "\\text{Evelyn}"),
        ("\\boxed{p-q}", "p - q"),
        ("\\boxed{\\$1{,}250}", "1250"),
        ("\\boxed{60^\\circ}", "60"),
        ("\\boxed{\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ],
)
def test_a_box_with_the_value_of_the_truth_is_right(answer, truth):
    assert Math().grade(answer, truth, {}) == {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "2",
        "\\boxed{3}",
        "\\boxed{2} or \\boxed{3}",
        "\\boxed{2",
        "\\boxed{}",
        "\\boxed{" + "1+" * 200 + "1}",
        "boxed{2}",
    ],
    ids=["nothing", "no box", "another", "two boxes", "cut", "empty", "long", "no command"],
)
def test_anything_but_the_value_in_the_last_box_is_wrong(answer):
    assert Math().grade(answer, "2", {})["acc"] == 0.0
