"""``goldilocks filter``: from a file of rollouts to a table and a file of those kept."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from goldilocks.cli import main
from goldilocks.runs.records import read_records, write_records

ROWS = [
    {
        "uid": f"prompt {group}",
        "reward": float(row % 4 == 0 and group > 0),
        "length": 10 * row + 1,
        "text": f"{group}/{row}",
    }
    for group in range(3)
    for row in range(12)
]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    write_records(tmp_path / "rollouts.jsonl", ROWS)
    return tmp_path / "rollouts.jsonl"


def dump(directory: Path, steps: int = 2) -> Path:
    """What verl's V1 trainer writes: no lengths, and a key of the sample where one expects the group's uid."""
    for step in range(1, steps + 1):
        rows = [
            {"input": f"{p}?", "output": "word " * (p + r + 1), "gts": "", "score": float(r % 2), "step": step}
            | {"uid": f"{step}-{p}_{r}_0"}
            for p in range(3)
            for r in range(4)
        ]
        write_records(directory / f"{step}.jsonl", rows)
    return directory


def metrics_of(printed: str) -> dict[str, float]:
    cells = [line.replace("│", " ").split() for line in printed.splitlines() if "/" in line and line.startswith("│")]
    return {name: float(value.replace(",", "")) for name, value in cells}


def test_the_kept_rows_are_written_and_the_metrics_printed(
    rollouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kept.parquet"
    arguments = ["--target-group-size", "4", "--strategy", "efficiency", "--out", str(out)]
    assert main(["filter", str(rollouts), *arguments]) == 0
    kept = read_records(out)
    assert [row["text"] for row in kept] == ["1/0", "1/1", "1/2", "1/3", "2/0", "2/1", "2/2", "2/3"]
    printed = capsys.readouterr().out
    assert metrics_of(printed)["batch/selection_rate"] == pytest.approx(8 / 36, abs=1e-4)
    assert metrics_of(printed)["batch/low_variance_groups"] == 1
    assert "lengths: column 'length'" in printed
    assert f"8 of 36 rows written to {out}" in printed


def test_without_out_nothing_is_written(rollouts: Path, tmp_path: Path) -> None:
    assert main(["filter", str(rollouts), "--target-group-size", "4"]) == 0
    assert list(tmp_path.iterdir()) == [rollouts]


def test_every_step_of_a_verl_dump_is_a_batch_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kept.jsonl"
    options = ["--target-group-size", "4", "--target-num-groups", "2", "--out", str(out)]
    assert main(["filter", str(dump(tmp_path / "dumps")), *options]) == 0
    steps = [row["step"] for row in read_records(out)]
    assert (steps.count(1), steps.count(2)) == (8, 8)
    printed = capsys.readouterr().out
    assert "mean of 2 steps" in printed
    assert "lengths: words of 'output', for want of a column with token counts (--length-column)" in printed


def test_an_answer_without_words_has_the_token_that_ended_it(tmp_path: Path) -> None:
    rows = [{"uid": "a", "output": "", "score": 1.0}, {"uid": "a", "output": "no idea", "score": 0.0}]
    write_records(tmp_path / "rows.jsonl", rows)
    assert main(["filter", str(tmp_path / "rows.jsonl"), "--target-group-size", "2"]) == 0


def test_columns_can_be_named(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "correct": row % 2 == 0, "n_tokens": row + 1, "output": "x"} for row in range(6)]
    write_records(tmp_path / "rows.parquet", rows)
    names = ["--uid-column", "prompt", "--reward-column", "correct", "--length-column", "n_tokens"]
    out = tmp_path / "kept.jsonl"
    options = [*names, "--target-group-size", "2", "--strategy", "efficiency", "--out", str(out)]
    assert main(["filter", str(tmp_path / "rows.parquet"), *options]) == 0
    assert [row["n_tokens"] for row in read_records(out)] == [1, 2]


def test_options_reach_the_filter(rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target-group-size", "12", "--max-response-length", "21", "--remove-clip", "--min-rollout-n", "3"]
    assert main(["filter", str(rollouts), *options]) == 0
    assert metrics_of(capsys.readouterr().out)["batch/overlong_groups"] == 3
    assert main(["filter", str(rollouts), "--target-group-size", "12", "--keep-low-variance"]) == 0
    assert metrics_of(capsys.readouterr().out)["batch/selected_groups"] == 3
    larger = ["--target-group-size", "32"]  # twelve rows are less than half of it, and all that a group was given
    for options, trained in (([], 0), (["--varying-group-sizes"], 2)):
        assert main(["filter", str(rollouts), *larger, *options]) == 0
        assert metrics_of(capsys.readouterr().out)["batch/selected_groups"] == trained


def test_the_seed_decides_the_draw(tmp_path: Path) -> None:
    rows = [{"uid": row // 16, "reward": random.Random(row).random(), "length": row + 1} for row in range(320)]
    write_records(tmp_path / "rows.jsonl", rows)

    def kept(seed: int) -> list[dict[str, object]]:
        options = ["--target-group-size", "8", "--strategy", "uniform", "--seed", str(seed)]
        assert main(["filter", str(tmp_path / "rows.jsonl"), *options, "--out", str(tmp_path / "kept.jsonl")]) == 0
        return read_records(tmp_path / "kept.jsonl")

    assert kept(1) == kept(1) != kept(2)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"uid": "a", "length": 1}],
            [],
            "--reward-column=reward or rewards or score is not accepted: a column of the file, which has uid, length",
        ),
        ([{"uid": "a", "reward": 1}], [], "--length-column=response_length or"),
        ([{"uid": "a", "reward": 1, "output": "x"}], ["--length-column", "n"], "--length-column=n is not accepted"),
        ([{"uid": "a", "reward": "1", "length": 1}], [], "row 1: reward='1' is not accepted: a number"),
        ([{"reward": 1, "length": 1}], [], "row 0: no column 'uid'"),
        ([{"uid": "a", "reward": float("nan"), "length": 1}], [], "rewards[0]=nan is not accepted: a finite number"),
        ([{"uid": "a", "reward": 1, "length": 1}], ["--min-group-size", "2"], "min_group_size=2 is not accepted: 9"),
    ],
)
def test_what_cannot_be_filtered_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, object]], options: list[str], message: str
) -> None:
    write_records(tmp_path / "rows.jsonl", rows)
    assert main(["filter", str(tmp_path / "rows.jsonl"), *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_invalid_rows_can_be_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"uid": "a", "reward": value, "length": 3} for value in (1.0, 0.0, float("nan"))]
    write_records(tmp_path / "rows.jsonl", rows)
    assert main(["filter", str(tmp_path / "rows.jsonl"), "--target-group-size", "2", "--drop-invalid"]) == 0
    assert metrics_of(capsys.readouterr().out)["rejection/invalid_rows"] == 1
