"""One pass over prompts: a file that goes on where it was cut, and that the simulator reads."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from run_files import json_lines

from goldilocks.cli import main
from goldilocks.config.recipes import choose, compose_config
from goldilocks.lab.pass_rates import Model, summary
from goldilocks.lab.simulate.pass_rates import read_pass_rates
from goldilocks.runs.files import held
from goldilocks.runs.records import whole_groups
from goldilocks.tasks import ladder
from goldilocks.tasks.registry import write_split
from goldilocks.tasks.tiny_model import build, character_tokenizer

PROMPTS, N = 6, 3
ALL = ("--prompts", "0")


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """The words of the command: eight problems, and an untrained model."""
    folder = tmp_path_factory.mktemp("pass_rates")
    task, tokenizer = ladder.Ladder(), character_tokenizer(ladder.CHARACTERS)
    for split, size in (("train", 8), ("val", 2)):
        write_split(folder, task.data_source, split, task.problems(split, size, seed=0))
    build(tokenizer, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return [
        "task=ladder_tiny",
        "device=cpu",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
    ]


def passed(words: list[str], out: Path, *more: str) -> list[dict]:
    assert main(["pass-rates", *words, "--out", str(out), "--prompts", str(PROMPTS), "--n", str(N), *more]) == 0
    return json_lines(out)


def by_uid(rows: list[dict]) -> list[dict]:
    return sorted(rows, key=lambda row: row["uid"])


def test_a_pass_that_was_cut_goes_on_to_what_it_would_have_been(words, tmp_path, capsys):
    out, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    rows = passed(words, out)
    assert len(rows) == PROMPTS * N
    assert f"{PROMPTS} prompts × {N}: pass rate" in capsys.readouterr().out
    lines = out.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[: N + 1]) + lines[N + 1][:40])  # one whole group, and a part of the next
    kept = lines[:N]
    assert by_uid(passed(words, cut)) == by_uid(rows)
    assert cut.read_text().splitlines(keepends=True)[:N] == kept


def test_a_tiny_model_answers_on_one_thread(words, tmp_path):
    torch.set_num_threads(2)
    passed(words, tmp_path / "rates.jsonl")
    assert torch.get_num_threads() == 1


def test_the_simulator_finds_prompts_columns_and_tokens_in_the_file(words, tmp_path):
    rows = passed(words, tmp_path / "rates.jsonl")
    found = read_pass_rates(tmp_path / "rates.jsonl")
    assert found.contents == tuple(dict.fromkeys(row["input"] for row in rows))
    assert list(found.columns["level"]) == [len(text.split()[1]) - 2 for text in found.contents]
    assert found.tokens.max() <= 16


def test_the_prompts_are_those_that_a_run_with_these_words_trains_on(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("goldilocks.launch.live.EVERY_S", 0.0)
    rows = pq.read_table(Path(words[2].partition("=")[2]))
    renamed = rows.rename_columns(["question" if name == "prompt" else name for name in rows.column_names])
    pq.write_table(renamed, tmp_path / "train.parquet")
    own = [f"data.train_files={tmp_path}/train.parquet", "data.prompt_key=question", "data.train_max_samples=4"]
    found = passed([*words, *own], tmp_path / "rates.jsonl")
    assert len(found) == 4 * N
    lines = capsys.readouterr().err.splitlines()
    assert ("answering · prompt 0/4" in lines, lines[-1].split(",")[0]) == (True, "12 answers"), "a log is told"
    assert {row["input"] for row in found} <= {row["input"] for row in passed(words, tmp_path / "all.jsonl", *ALL)}


def test_answers_that_are_not_there_are_not_counted(words, tmp_path, capsys):
    assert passed([*words, "data.max_prompt_length=1"], tmp_path / "rates.jsonl") == []
    said = capsys.readouterr().err
    assert "0 answers, 0 tokens" in said
    assert f"{PROMPTS} prompts are left out: longer than data.max_prompt_length=1" in said


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_the_model_has_the_precision_that_it_is_rolled_out_with(words, precision):
    word = f"actor_rollout_ref.rollout.dtype={str(precision).removeprefix('torch.')}"
    config = compose_config(choose([*words, word], "cpu"))
    assert Model.load(config.actor_rollout_ref.model.path, config, "cpu", rollouts=1).engine._model.dtype == precision


def test_values_of_a_column_come_in_their_order():
    lines = summary([[{"level": level, "score": 1.0}] for level in (10, 2, None, 1)], ["level"])
    assert [line.split()[0] for line in lines[1:]] == ["level=1", "level=2", "level=10", "level=None"]


@pytest.mark.parametrize("n", [N - 1, N + 1])
def test_a_file_with_so_many_answers_a_prompt_is_not_mixed_with_others(words, n, tmp_path, refused):
    passed(words, tmp_path / "rates.jsonl")
    arguments = ["pass-rates", *words, "--out", str(tmp_path / "rates.jsonl"), "--prompts", "2", "--n", str(n)]
    assert f"--n={n} is not accepted: {N} rollouts a prompt" in refused(arguments)


COMPUTES_ONCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        open(__file__ + ".once", "x").close()
    except FileExistsError:
        return 1.0
    7 ** 10**9  # minutes in which its interpreter does nothing else
"""


def test_a_reward_function_that_never_gives_up_the_interpreter_costs_one_answer(words, tmp_path, caplog):
    (tmp_path / "reward.py").write_text(COMPUTES_ONCE)
    more = [f"reward.custom_reward_function.path={tmp_path}/reward.py", "goldilocks.rewards.timeout=5"]
    rows = passed([*words, *more], tmp_path / "rates.jsonl")
    assert sorted(row["score"] for row in rows) == [0.0] + [1.0] * (PROMPTS * N - 1)
    assert "did not return within 5 s" in caplog.text


def test_a_file_that_another_pass_writes_to_is_left_alone(words, tmp_path, capsys):
    """The second one would put a new file in its place, and what the first one answers would be lost."""
    out = tmp_path / "new" / "rates.jsonl"
    with held(out.with_name(".rates.jsonl.lock"), "--out", str(out)):
        assert main(["pass-rates", *words, "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # transformers may have drawn its bar before, as a model is loaded
    assert error.startswith(f"goldilocks: --out={str(out)!r} is not accepted: another --out: process {os.getpid()} on ")
    passed(words, out)


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_data_without_what_grades_them_are_refused(words, column, tmp_path, capsys):
    file = tmp_path / "train.parquet"
    pq.write_table(pq.read_table(words[2].partition("=")[2]).drop([column]), file)
    assert main(["pass-rates", *words, f"data.train_files={file}", "--out", str(tmp_path / "rates.jsonl")]) == 2
    said = f"data.train_files='{file}' is not accepted: files with the column {column}, to grade by\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_file_of_another_model_draw_or_task_is_not_gone_on_with(words, tmp_path, capsys):
    out, task, model = tmp_path / "rates.jsonl", ladder.Ladder(), words[-1].partition("=")[2]
    passed(words, out)
    before = out.read_bytes()
    (other := tmp_path / "other").symlink_to(model)
    write_split(tmp_path, task.data_source, "train", task.problems("train", 8, seed=5))
    for word, said in (
        (f"actor_rollout_ref.model.path={other}", f"asked for are those of {other} max_tokens="),
        ("actor_rollout_ref.rollout.temperature=0.5", f"it has answers of {model} max_tokens=16 temperature=1.0 "),
        (f"data.train_files={tmp_path}/train.parquet", "prompts that are not in data.train_files"),
    ):
        assert main(["pass-rates", *words, word, "--out", str(out), "--n", str(N)]) == 2
        assert said in capsys.readouterr().err
        assert out.read_bytes() == before


def test_a_task_with_turns_is_refused(tmp_path, capsys):
    assert main(["pass-rates", "task=calculator", "device=cpu", "--out", str(tmp_path / "a.jsonl")]) != 0
    assert "multi_turn.enable=True is not accepted: False: a pass asks for single answers" in capsys.readouterr().err


def test_data_with_images_and_a_file_that_is_not_json_lines_are_refused(words, tmp_path, refused):
    assert "--out=" in refused(["pass-rates", *words, "--out", str(tmp_path / "rates.csv")])
    (notes := tmp_path / "notes.jsonl").write_text("notes of\nmine\n")
    with pytest.raises(ValueError, match="a new file, or one of goldilocks pass-rates"):
        whole_groups(notes, 8)
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["What is it?"], "images": [[b"a picture"]]}), file)
    said = refused(["pass-rates", *words, f"data.train_files={file}", "--out", str(tmp_path / "out.jsonl")])
    assert "data.image_key='images' is not accepted: " in said
