"""Reading run directories: whole ones, and every way in which they are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.lab.report.run_directories import HOSTILE

from goldilocks.hashing import content_key, with_media
from goldilocks.lab.report.run import prompt_texts, read_run, read_runs, run_names
from goldilocks.runs.history import History, at_or_before, increments, running_total
from goldilocks.runs.records import MOST_STEPS, Dump, GroupDump, evenly, read_dumps


def log(path: Path, *lines: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(lines))
    return path


def line(step: int, **data: object) -> str:
    return json.dumps({"step": step, "data": data}) + "\n"


def test_a_whole_run_lacks_nothing_and_its_beliefs_find_their_texts_in_the_training_data(dapo: Path) -> None:
    run = read_run(dapo, "dapo")
    assert run.missing == ()
    assert max(run.history.steps) == 24
    assert [dump.step for dump in run.dumps] == list(range(2, 25, 2))
    assert [beliefs.step for beliefs in run.beliefs] == [8, 16, 24]
    assert len(run.texts) == len(run.beliefs[-1].rows) > 100
    assert HOSTILE in run.texts.values()


def test_costs_are_the_collectors_own(dapo: Path) -> None:
    run = read_run(dapo, "dapo")
    for cost in ("rollouts", "tokens"):
        assert run.spending.total(cost) == run.history.last(f"accounts/generated_{cost}")
    assert run.spending.until("rollouts", 0) == 0
    assert run.spending.total("seconds") == pytest.approx(sum(run.history.series("timing_s/step").values()))


def test_prompts_with_images_find_their_texts_too(tmp_path: Path) -> None:
    file, images = (
        tmp_path / "train.parquet",
        [[{"bytes": b"first", "path": None}], [{"bytes": b"second", "path": None}]],
    )
    pq.write_table(pa.table({"prompt": ["<image> which?", "<image> which?"], "images": images}), file)
    keys = [content_key(with_media("<image> which?", [image])) for image in images]
    assert len(set(keys)) == 2
    assert prompt_texts(keys, {"data": {"train_files": str(file)}}, []) == dict.fromkeys(keys, "<image> which?")


def test_a_run_of_verls_own_command_has_the_config_that_hydra_wrote(dapo: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dapo, tmp_path / "copy"))
    (copy / ".hydra").mkdir()
    (copy / "config.yaml").rename(copy / ".hydra" / "config.yaml")
    assert read_run(copy, "copy").texts == read_run(dapo, "dapo").texts


def test_a_dump_that_has_the_keys_of_its_prompts_has_their_texts() -> None:
    group = GroupDump("user: 1 + 1", None, [1.0], [], key=7)
    assert prompt_texts([7, 8], {}, [Dump(1, (group,))]) == {7: "user: 1 + 1"}


def test_beliefs_without_texts_are_counted(dapo: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dapo, tmp_path / "copy"))
    (copy / "config.yaml").unlink()
    run = read_run(copy, "copy")
    assert run.texts == {}
    assert any("the texts of" in text for text in run.missing)


def test_a_run_that_has_just_begun_is_reported(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    run = read_run(tmp_path, "empty")
    assert len(run.history) == 0
    assert [text.split()[0] for text in run.missing] == ["config.yaml", "metrics.jsonl", "rollouts/", "checkpoints/"]


def test_a_cut_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    whole = line(1, a=1.0) + line(2, a=2.0)
    run = read_run(log(tmp_path, whole, line(3, a=3.0)[:-7]), "cut")
    assert run.history.series("a") == {1: 1.0, 2: 2.0}
    assert "metrics.jsonl: lines that are not whole and left out: 1" in run.missing


@pytest.mark.parametrize("text", ["", "\n\n", "null\n", "[1, 2]\n", '{"step": 1}\n', "\xff\xfe\n"])
def test_metrics_that_say_nothing_are_no_steps(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    assert "metrics.jsonl holds no step" in read_run(tmp_path, "silent").missing


def test_lines_of_one_step_are_one_step_and_the_last_word_counts() -> None:
    training = [{"step": 2, "data": {"a": 5}}, {"step": 1, "data": {"a": 1, "b": None}}]
    history = History.of([*training, {"step": 2, "data": {"a": 6, "c": 7}}])
    assert history.series("a") == {1: 1.0, 2: 6.0}
    assert history.series("b") == {}
    assert history.series("c") == {2: 7.0}


def test_a_run_that_was_started_again_is_one_history(tmp_path: Path) -> None:
    """The first start reached step 12, its last checkpoint was 10: 11 and 12 are done again, 12 not yet."""
    first = [line(step, a=1.0, b=1.0) for step in range(1, 13)]
    second = [line(10, c=2.0), line(11, a=2.0)]
    log(tmp_path, *first)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.1.jsonl")
    assert list(read_run(tmp_path, "waiting").history.steps) == list(range(1, 13))
    log(tmp_path, *second)
    history = read_run(tmp_path, "again").history
    assert list(history.steps) == list(range(1, 12))
    assert history.steps[10] == {"a": 1.0, "b": 1.0, "c": 2.0}
    assert history.series("a")[11] == 2.0
    log(tmp_path, *first, *second)  # a trainer of ours goes on with the file
    assert read_run(tmp_path, "whole").history == history


def test_running_totals_and_increments_undo_each_other() -> None:
    series = {1: 3.0, 2: 0.0, 5: -1.0}
    assert increments(running_total(series)) == series
    assert at_or_before(running_total(series), 4) == 3.0
    assert at_or_before(series, 0) is None


def test_without_a_collector_costs_follow_from_the_configuration(tmp_path: Path) -> None:
    steps = [line(step, **{"critic/score/mean": 0.5, "response_length/mean": 10.0 * step}) for step in (1, 2, 3)]
    log(tmp_path, *steps)
    (tmp_path / "config.yaml").write_text("data: {train_batch_size: 4}\nactor_rollout_ref: {rollout: {n: 2}}\n")
    spending = read_run(tmp_path, "plain").spending
    assert spending.totals["rollouts"] == {1: 8, 2: 16, 3: 24}
    assert spending.totals["tokens"] == {1: 80, 2: 240, 3: 480}
    assert spending.total("seconds") is None


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "\x00", ""])
def test_a_broken_configuration_is_no_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert read_run(tmp_path, "broken").config == {}


def test_a_half_written_checkpoint_is_said(dapo: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dapo, tmp_path / "copy"))
    file = copy / "checkpoints/global_step_24/goldilocks.npz"
    file.write_bytes(file.read_bytes()[:1000])
    run = read_run(copy, "copy")
    assert [beliefs.step for beliefs in run.beliefs] == [8, 16]
    assert "the beliefs of step 24 cannot be read: the checkpoint is not whole" in run.missing


def test_answers_that_are_not_whole_are_counted(tmp_path: Path) -> None:
    answer = {"input": "q", "output": "\ud800 a", "gts": None, "score": 1.0, "step": 3}
    rows = [json.dumps(answer), json.dumps({**answer, "score": "high"}), json.dumps(answer)[:20]]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/3.jsonl").write_text("\n".join(rows))
    run = read_run(tmp_path, "cut")
    assert [group.scores for dump in run.dumps for group in dump.groups] == [[1.0]]
    assert [answer.text for answer in run.dumps[0].groups[0].answers] == ["? a"]
    assert "rollouts/: lines that are not whole and left out: 2" in run.missing


def test_a_group_keeps_its_best_and_its_worst_answer(dapo: Path) -> None:
    for dump in read_dumps(dapo / "rollouts"):
        for group in dump.groups:
            assert [answer.score for answer in group.answers] == [1.0, 0.0]  # dapo keeps only groups that differ
            assert len(group.scores) == 8
            assert 0 < group.pass_rate < 1


def test_a_long_run_is_sampled_from_its_first_step_to_its_last() -> None:
    chosen = evenly(range(1, 1001), MOST_STEPS)
    assert len(chosen) == MOST_STEPS == len(set(chosen))
    assert (chosen[0], chosen[-1]) == (1, 1000)
    assert evenly([1, 2], MOST_STEPS) == [1, 2]


def test_runs_are_called_by_what_tells_them_apart_and_the_same_twice_is_refused(dapo: Path) -> None:
    assert run_names([Path("/r/a/x"), Path("/r/b/y")]) == ["x", "y"]
    assert run_names([Path("/r/a/x"), Path("/r/b/x")]) == ["a/x", "b/x"]
    with pytest.raises(ValueError, match="each run once"):
        read_runs([dapo, dapo / "../dapo"])
