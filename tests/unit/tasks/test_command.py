"""``goldilocks data make`` writes what verl reads."""

from __future__ import annotations

import pyarrow.parquet as pq

from goldilocks.cli import main


def test_rows_have_the_columns_verl_reads_and_the_same_seed_writes_the_same_bytes(tmp_path):
    out, again = tmp_path / "a", tmp_path / "b"
    for folder in (out, again):
        assert main(["data", "make", "arithmetic", "--out", str(folder), "--train", "30", "--val", "10"]) == 0
    assert (out / "train.parquet").read_bytes() == (again / "train.parquet").read_bytes()
    rows = {split: pq.read_table(out / f"{split}.parquet").to_pylist() for split in ("train", "val")}
    assert (len(rows["train"]), len(rows["val"])) == (30, 10)
    row = rows["train"][0]
    assert row["data_source"] == "goldilocks/arithmetic"
    assert row["prompt"][0]["role"] == "user"
    assert row["reward_model"]["ground_truth"].lstrip("-").isdigit()
    assert row["extra_info"]["split"] == "train"
    assert row["extra_info"]["difficulty"] >= 1
    assert sorted(path.name for path in out.iterdir()) == ["train.parquet", "val.parquet"]


def test_no_file_is_replaced_unless_it_is_forced(tmp_path, refused):
    words = ["data", "make", "arithmetic", "--out", str(tmp_path), "--train", "3", "--val", "2"]
    (tmp_path / "val.parquet").write_text("mine")
    assert "a folder without val.parquet (--force replaces the file)" in refused(words)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert main([*words, "--force"]) == 0
    assert len(pq.read_table(tmp_path / "val.parquet")) == 2


def test_wrong_options_are_one_line_and_status_2(tmp_path, refused):
    out = ["--out", str(tmp_path)]
    for words, message in (
        (["arithmatic"], "did you mean 'arithmetic'"),
        (["arithmetic", "--generator", "x"], "--generator is not an option of task arithmetic"),
        (["reasoning_gym"], "needs --generator"),
        (["arithmetic", "--val", "0"], "--val=0 is not accepted: 1 or more"),
    ):
        assert message in refused(["data", "make", *words, *out])


def test_a_mixture_of_generators_with_knobs(tmp_path):
    generators = ["--generator", "leg_counting:max_animals=3", "--generator", "chain_sum:max_terms=3,share=3"]
    assert (
        main(["data", "make", "reasoning_gym", *generators, "--out", str(tmp_path), "--train", "8", "--val", "4"]) == 0
    )
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["extra_info"]["generator"] for row in rows].count("chain_sum") == 6
    assert {row["data_source"] for row in rows} == {"reasoning_gym/leg_counting+chain_sum"}
