"""What ``goldilocks train`` says and does before, beside and after verl: no Ray is started here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from run_files import write_task

from goldilocks.cli import main
from goldilocks.config.recipes import choose, compose_config, names, quoted
from goldilocks.launch.preflight import check_paths, refuse_other_recipe
from goldilocks.launch.train import explain, prepared
from goldilocks.runs.costs import Progress, clock
from goldilocks.runs.files import RunDir
from goldilocks.runs.history import validation_accuracy
from goldilocks.verl.checks import unread


@pytest.fixture(autouse=True)
def _a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are there, so that only a word may be wrong."""
    monkeypatch.setenv("GOLDILOCKS_TASK", str(write_task(tmp_path / "arithmetic")))


def compose(*words: str):
    return compose_config(choose(words, "cpu"))


def test_without_words_it_is_grpo_on_arithmetic():
    choice = choose([], "cpu")
    assert (choice.recipe, choice.task, choice.device) == ("grpo", "arithmetic", "cpu")


@pytest.mark.parametrize("task", names("task"))
def test_every_task_composes_on_a_gpu(task):
    config = compose(f"task={task}", "device=cuda")
    assert config.trainer.device == "cuda"
    assert config.reward.custom_reward_function.name == "compute_score"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gropo"], "did you mean 'grpo'?"),
        (["grpo", "dapo"], "one recipe at a time"),
        (["task=arithmetik"], "did you mean 'arithmetic'?"),
        (["device=tpu"], "device='tpu' is not accepted: one of cpu, cuda"),
        (["trainer=trll"], "trainer='trll' is not accepted: one of verl, trl (did you mean 'trl'?)"),
        (["trainer.total_training_step=3"], "nearest: trainer.total_training_steps"),
        (["+goldilocs.selector=thompson"], "'goldilocs' is not a section (did you mean 'goldilocks'?)"),
        (["n_resp_per_prompt=16"], "n_resp_per_prompt='16' is not accepted: actor_rollout_ref.rollout.n, the rollouts"),
        (["+n_resp_per_prompt=16"], "n_resp_per_prompt=16 is not accepted: actor_rollout_ref.rollout.n, the rollouts"),
        (["rollout_mode=sync"], "rollout_mode='sync' is not accepted: actor_rollout_ref.rollout.mode, for which verl"),
        (["actor_rollout_ref.rollout.mode=sync"], "actor_rollout_ref.rollout.mode='sync' is not accepted: async"),
        (["rollout.n=3"], "nearest: actor_rollout_ref.rollout.n"),
        (["goldilocs.selector=frontier"], "nearest: goldilocks.selector, goldilocks.selector_kwargs"),
        (["trainer.rejection_sample=true"], "not accepted: no such switch; batch_filter.max_response_length=N rejects"),
        (["+rejection_sample=true"], "rejection_sample=True is not accepted: no such switch; batch_filter.max_res"),
        (["batch_filter.rejection_sample=true"], "not accepted: no such switch; batch_filter.max_response_length=N"),
        (["batch_filter.gate_always=true"], "not accepted: for library calls alone: a trainer judges every group"),
        (["trainer.save_freq=[1"], "no viable alternative"),
        (["actor_rollout_ref.model.path=/no/such/model"], "actor_rollout_ref.model.path='/no/such/model' is not"),
        (["goldilocks.budget.rollouts=0"], "goldilocks.budget.rollouts=0 is not accepted: a number above 0"),
        (["goldilocks.budget.rollouts=9", "trainer.use_v1=false"], "needs trainer.use_v1=True"),
        (["trainer=trl", "data.train_batch_size=4"], "ppo_mini_batch_size=32 is not accepted: a divisor of 4"),
        (["trainer.total_training_steps=abc"], "trainer.total_training_steps='abc' is not accepted: a whole number"),
        (["trainer.total_training_steps=0"], "trainer.total_training_steps=0 is not accepted: a whole number above 0,"),
        (["data.max_prompt_length=null"], "data.max_prompt_length=None is not accepted: a whole number above 0"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=0"], "ppo_mini_batch_size=0 is not accepted: a whole number"),
        (["actor_rollout_ref.model.path=null"], "actor_rollout_ref.model.path=None is not accepted: a word"),
        (["data.train_files=[]"], "data.train_files='' is not accepted: a file that exists"),
        (["--stall-timeout", "0"], "--stall-timeout=0.0 is not accepted: seconds above 0"),
        (["--reward-timeout", "nan"], "--reward-timeout=nan is not accepted: seconds above 0"),
        (
            ["trainer=trl", "trainer.save_freq=abc"],
            "trainer.save_freq='abc' is not accepted: a number with trainer=trl",
        ),
        (["trainer=trl", "trainer.logger=wandb"], "trainer.logger=['wandb'] is not accepted: console and file"),
        (["batch_filter.enable=maybe"], "batch_filter.enable='maybe' is not accepted: true or false"),
        (["data.prompt_key=question"], "data.prompt_key='question' is not accepted: a column of "),
        (["task=gsm8k", "data.train_files=/no/such/file.parquet"], "data.train_files='/no/such/file.parquet'"),
    ],
)
def test_bad_words_are_one_line_and_status_2(words, message, tmp_path, refused):
    assert message in refused(["train", *words, "--runs", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("rows", "accepted"), [([], "a file with rows"), (None, "a parquet file (")])
@pytest.mark.parametrize("words", [["train"], ["train", "trainer=trl"], ["pass-rates", "--out", "rates.jsonl"]])
def test_data_that_are_empty_or_no_parquet_are_one_line(words, rows, accepted, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "arithmetic/data/train.parquet"
    file.write_bytes(b"")
    if rows is not None:
        pq.write_table(pa.table({"prompt": pa.array(rows, pa.string())}), file)
    assert refused(words).startswith(f"goldilocks: data.train_files={str(file)!r} is not accepted: {accepted}")


@pytest.mark.parametrize("word", ["+goldilocks.selector=thompson", "+algorithm.filter_groups.on_full=requeue"])
def test_a_word_of_verls_own_command_line_is_taken_as_it_is(word):
    key, _, value = word[1:].partition("=")
    assert OmegaConf.select(compose("dapo", word), key) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["dapo_strata", "goldilocks.strata.columns=[level,type]"],
            "selector thompson, prior strata by level, type, allocator fixed (8 rollouts), filter variance of acc",
        ),
        (["adaptive", "trainer=trl"], "prior flat, allocator adaptive (32 rollouts at most), filter none"),
        (
            ["trainer.v1.trainer_mode=sync", "goldilocks.selector=thompson"],
            "goldilocks.selector=thompson: no effect with trainer.v1.trainer_mode=sync, a trainer of verl's own",
        ),
        (["trainer.use_v1=false", "+batch_filter.gate_always=True"], "no effect with trainer.use_v1=False"),
        (["goldilocks.prior=strata"], "goldilocks.prior='strata' has no effect: it is read with a selector"),
        (
            ["batch_filter.gate1_mode=abs"],
            "batch_filter.gate1_mode='abs' has no effect: it is read with batch_filter.en",
        ),
        (["adaptive_rollout.max_n=64", "trainer=trl"], "adaptive_rollout.max_n=64 has no effect: it is read with "),
    ],
)
def test_a_run_says_at_its_start_what_decides_or_what_has_no_effect(words, said, tmp_path, monkeypatch, capsys):
    """In the place of Python stands a program that ends at once."""
    monkeypatch.setattr("sys.executable", "/bin/true")
    assert main(["train", *words, "trainer.total_training_steps=2", "--runs", str(tmp_path), "--name", "run"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if said in line]) == 1


def test_a_run_on_data_that_are_elsewhere_has_no_known_number_of_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.executable", "/bin/true")
    words = ["data.train_files='hdfs://far/train.parquet'", "trainer.total_training_steps=null"]
    assert main(["train", *words, "--runs", str(tmp_path), "--name", "run"]) == 0
    progress = Progress(total_steps=math.inf, rollouts_per_step=32)
    progress.add({"step": 3, "data": {"critic/score/mean": 0.5, "timing_s/step": 2.0}})
    assert (progress.line(), progress.done, progress.eta) == ("step 3 · reward 0.50 · 32 rollouts", 0.0, None)


def test_a_run_of_verls_own_trainer_with_our_defaults_says_nothing():
    assert unread(compose("trainer.v1.trainer_mode=sync", "task=ladder_tiny")) == ""


def test_where_the_user_hides_the_gpus_ray_still_counts_a_device_for_each_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with prepared(choose(["trainer.n_gpus_per_node=2"], "cpu"), tmp_path / "runs", "one") as launch:
        assert launch.env["CUDA_VISIBLE_DEVICES"] == "-1,-1"


def test_the_time_limit_of_a_reward_function_reaches_what_verl_calls(tmp_path, monkeypatch):
    """In the place of Python stands a program that ends at once."""
    monkeypatch.setattr("sys.executable", "/bin/true")
    words = ["--reward-timeout", "5", "trainer.total_training_steps=2", "--runs", str(tmp_path), "--name", "run"]
    assert main(["train", *words]) == 0
    reward = OmegaConf.load(tmp_path / "run/config.yaml").reward.custom_reward_function
    assert json.loads(reward.reward_kwargs.packed)[2] == 5.0


def test_a_name_on_the_hub_is_taken_for_a_model():
    check_paths(compose("actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"))


def test_a_run_directory_keeps_what_an_earlier_try_left_and_no_name_leads_out_of_it(tmp_path):
    first = RunDir.create(tmp_path, "a")
    first.metrics.write_text("one")
    first.checkpoints.mkdir()
    second = RunDir.create(tmp_path, "a")
    second.begin(appends=True)
    assert second.metrics.read_text() == "one"
    second.begin(appends=False)
    assert not second.metrics.exists()
    assert (second.path / "metrics.1.jsonl").read_text() == "one"
    assert second.checkpoints.exists()
    assert stat.S_IMODE(os.stat(second.secret).st_mode) == 0o600
    with pytest.raises(ValueError, match="--name="):
        RunDir.create(tmp_path, "../elsewhere")


def test_a_second_start_is_refused_while_the_first_trains(tmp_path, refused):
    runs = tmp_path / "runs"
    with prepared(choose([], "cpu"), runs, "one") as launch:
        launch.run_dir.metrics.write_text("first")
        said = refused(["train", "--runs", str(runs), "--name", "one"])
        assert f"--name='one' is not accepted: another --name: process {os.getpid()} on " in said
        assert launch.run_dir.metrics.read_text() == "first"
    with prepared(choose([], "cpu"), runs, "one") as again:
        assert again.changed == ""


@pytest.mark.parametrize("words", [[], ["trainer=trl"]], ids=["verl", "trl"])
def test_a_run_that_begins_anew_keeps_the_metrics_of_its_earlier_start(words, tmp_path):
    runs, metrics = tmp_path / "runs", []
    for resume_mode in ("auto", "auto", "disable"):
        with prepared(choose([*words, f"trainer.resume_mode={resume_mode}"], "cpu"), runs, "one") as launch:
            metrics.append(launch.run_dir.metrics.exists())
            launch.run_dir.metrics.write_text("logged")
    assert metrics == [False, True, False]
    assert (runs / "one" / "metrics.1.jsonl").read_text() == "logged"


def test_a_run_goes_on_with_its_own_recipe_alone(tmp_path, refused):
    runs = tmp_path / "runs"
    with prepared(choose(["grpo"], "cpu"), runs, "one"):
        pass
    for words, named in ((["trainer=trl"], "grpo task=arithmetic trainer=trl ("), (["dapo"], "dapo task=arithmetic (")):
        said = refused(["train", *words, "--runs", str(runs), "--name", "one"])
        there = f"another name: {runs.resolve()}/one is a run of grpo task=arithmetic, and this is {named}"
        assert f"--name='one' is not accepted: {there}" in said
    assert "algorithm.filter_groups.enable False → True" in said
    with prepared(choose(["trainer.total_training_steps=40"], "cpu"), runs, "one") as longer:
        assert longer.changed == "trainer.total_training_steps 20 → 40"


@contextlib.contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_start_that_finds_the_disk_full_leaves_the_files_by_which_the_next_one_goes_on(tmp_path):
    choice, runs = choose([], "cpu"), tmp_path / "runs"
    with prepared(choice, runs, "one") as launch:
        pass
    with files_of_at_most(100), pytest.raises(OSError, match="large"), prepared(choice, runs, "one"):
        pass
    with files_of_at_most(10), pytest.raises(OSError, match="large"):
        refuse_other_recipe(launch.run_dir, choice, "")
    with prepared(choice, runs, "one") as again:
        assert again.changed == ""


def test_progress_adds_up_what_verl_logs():
    progress = Progress(total_steps=4, rollouts_per_step=32)
    progress.add({"step": 0, "data": {"val-core/goldilocks/arithmetic/acc/mean@1": 0.25}})
    for step in (1, 2):
        progress.add(
            {"step": step, "data": {"critic/score/mean": 0.5, "response_length/mean": 5.0, "timing_s/step": 2.0}}
        )
    progress.add({"step": 2, "data": {"val-core/goldilocks/arithmetic/acc/mean@1": 0.5}})
    assert (progress.rollouts, progress.tokens, progress.steps_done, progress.eta) == (64, 320, 2, 4.0)
    assert progress.line() == "step 2/4 · reward 0.50 · validation 25.0% → 50.0% · 64 rollouts · 0:04 left"
    assert ("validation", "25.0% → 50.0% (+25.0 points)") in progress.summary(elapsed=10)


def spending(*shares: float, first: int = 1) -> Progress:
    progress = Progress(total_steps=1_000, rollouts_per_step=32, spent=[0.0])
    for step, share in enumerate(shares, start=first):
        data = {"critic/score/mean": 0.5, "timing_s/step": 3.0, "budget/spent": share}
        progress.add({"step": step, "data": data})
    return progress


def test_with_a_budget_progress_is_what_is_spent_of_it():
    progress = spending(0.125, 0.25)
    assert (progress.done, progress.eta) == (0.25, 18.0)
    assert progress.line() == "step 2 · 25% of the budget · reward 0.50 · 64 rollouts · 0:18 left"
    assert spending().line() == "step 0 · 0% of the budget · 0 rollouts"
    assert spending(0.5, 1.25).eta == 0.0


def test_validation_takes_time_too():
    progress = Progress(total_steps=10, rollouts_per_step=32)
    for step in (1, 2):
        data = {"critic/score/mean": 0.5, "timing_s/step": 3.0, **({"timing_s/testing": 4.0} if step == 2 else {})}
        progress.add({"step": step, "data": data})
    assert progress.eta == (3 + 2) * 8


def test_a_resumed_run_does_not_take_what_was_spent_before_for_its_own_pace():
    assert spending(0.5, 0.75, first=7).eta == 3.0
    assert spending(0.5, first=7).eta == 3.0 * 993  # nothing to go by yet but the steps


def test_validation_is_the_mean_over_data_sources():
    data = {"val-core/a/acc/mean@1": 0.2, "val-core/b/acc/mean@1": 0.4, "val-aux/a/score/mean@1": 0.9, "x": 1}
    assert validation_accuracy(data) == pytest.approx(0.3)
    assert validation_accuracy({"x": 1}) is None


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.2, "1:05"), (3600, "1:00:00"), (-1, "0:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_a_folder_may_have_any_name():
    names = {"default_local_dir": "a, b", "rollout_data_dir": "it's = 3", "validation_data_dir": "(x) {y} [z]"}
    names |= {"project_name": "50%: done"}
    trainer = compose(*(f"trainer.{key}={quoted(folder)}" for key, folder in names.items())).trainer
    assert {key: trainer[key] for key in names} == names


def test_the_last_step_is_shown_also_where_the_run_ends_between_two_looks_at_it(tmp_path, monkeypatch, capsys):
    """In the place of Python stands a program that logs a step and ends at once."""
    record = {"step": 2, "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0}}
    quick = tmp_path / "python"
    quick.write_text(f"#!/bin/sh\nsleep 0.1\necho '{json.dumps(record)}' >> \"$VERL_FILE_LOGGER_PATH\"\n")
    quick.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(quick))
    assert main(["train", "trainer.total_training_steps=2", "--runs", str(tmp_path), "--name", "run"]) == 0
    assert "step 2/2 · reward 0.50" in capsys.readouterr().out


# -- why a run ended ---------------------------------------------------------------------------------------------------


def test_what_was_written_for_the_user_is_said_as_it_is_and_any_other_error_by_type_and_place(tmp_path: Path) -> None:
    said = explain(ValueError("data.seed='x' is not accepted:\n a number"), RunDir(tmp_path))
    assert said == "data.seed='x' is not accepted: a number"
    try:
        raise LookupError("no such answer")
    except LookupError as error:
        said = explain(error, RunDir(tmp_path))
    assert said.startswith("LookupError: no such answer")
    assert "test_train_cli.py" in said


def test_a_full_disk_is_said_whatever_torch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    said = explain(RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos"), RunDir(tmp_path))
    assert said.startswith(f"the disk of {tmp_path} is full (3 MiB left): RuntimeError: [enforce fail")


def test_the_disk_is_said_to_be_full_also_where_the_driver_had_no_room_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    assert run.failure(9) == "the driver ended with status 9"
    run.reason.write_text("")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert run.failure(1) == f"the disk of {tmp_path} is full (0 MiB left)"
    run.reason.write_text("data.seed='x' is not accepted")
    assert run.failure(1) == "data.seed='x' is not accepted"
