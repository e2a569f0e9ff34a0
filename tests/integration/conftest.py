"""Real verl on real Ray on the CPU: a tiny model and task made on the spot; a launch leaves nothing running."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from goldilocks.engine.cpu import platform_env
from goldilocks.launch import supervisor
from goldilocks.tasks.arithmetic import Arithmetic
from goldilocks.tasks.registry import write_split
from goldilocks.tasks.tiny_model import tiny_model

PATIENCE_S = 800.0  # for what is sure to happen: a busy machine is not a mistake

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    acc = float(solution_str.strip() == str(ground_truth))
    return {"score": acc, "acc": acc}


def raises(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    raise LookupError("the answer sheet is missing")
"""


@dataclass(frozen=True)
class Task:
    """Single-digit addition, a tiny Llama half-way to it, and its reward."""

    model: Path
    train: Path
    validation: Path
    reward: Path


@dataclass(frozen=True)
class Run:
    """A finished launch: its exit status, everything it printed, and one dict of metrics per logged step."""

    status: int
    log: str
    steps: list[dict[str, float]]
    seconds: float
    folder: Path

    def tail(self, lines: int = 60) -> str:
        """The end of the log, to show when an assertion fails."""
        return "\n".join(self.log.splitlines()[-lines:])

    def updates(self) -> dict[int, dict[str, float]]:
        """What was logged of each update; at each the rollout's probabilities were the trainer's."""
        updates = {int(step["step"]): step for step in self.steps if "actor/grad_norm" in step}
        for step in updates.values():
            assert step["training/rollout_probs_diff_valid"] == 1
            assert step["training/rollout_probs_diff_max"] < 1e-5
            # Of verl's pass for old_log_probs; our trainer needs none where a batch is one optimizer step.
            if "rollout_corr/log_ppl_diff_max" in step:
                assert step["rollout_corr/log_ppl_diff_max"] < 1e-5
                assert step["rollout_corr/log_ppl_diff_min"] > -1e-5
            assert 0 < step["actor/grad_norm"] < 1e3
        return updates


Launch = Callable[..., Run]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Made once for all tests."""
    root = tmp_path_factory.mktemp("task")
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(root / "model")
    _warm_started(tokenizer).save_pretrained(root / "model")
    rows = [_row(index, a, b) for index, (a, b) in enumerate(_PAIRS)]
    random.Random(0).shuffle(rows)
    _write(root / "train.parquet", rows)
    _write(root / "validation.parquet", rows[:16])
    (root / "reward.py").write_text(REWARD)
    return Task(root / "model", root / "train.parquet", root / "validation.parquet", root / "reward.py")


@pytest.fixture
def launch(task: Task, tmp_path: Path) -> Iterator[Launch]:
    """``launch(*overrides, within=seconds)`` runs verl's own ``main_ppo``, or another program, to its end."""
    launched: dict[Path, subprocess.Popen[bytes]] = {}

    def run(
        *overrides: str,
        program: Sequence[str] = ("-m", "verl.trainer.main_ppo"),
        within: float = PATIENCE_S,
        during: Callable[[Path], None] | None = None,
    ) -> Run:
        folder = tmp_path / f"run{len(launched)}"
        folder.mkdir()
        log = folder / "log"
        started = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *program, *_overrides(task, tmp_path, folder), *overrides],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
            )
        launched[folder] = process
        if during is not None:
            during(log)
        try:
            status = process.wait(timeout=max(1, within - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            _end(process, folder)
            pytest.fail(f"still running after {within} s:\n" + "\n".join(log.read_text().splitlines()[-60:]))
        assert _gone(folder), f"left running: {_processes(folder)}"
        metrics = folder / "metrics.jsonl"
        lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []  # those that are whole
        steps = [json.loads(line)["data"] | {"step": json.loads(line)["step"]} for line in lines]
        return Run(status, log.read_text(errors="replace"), steps, time.monotonic() - started, folder)

    yield run
    for folder, process in launched.items():
        _end(process, folder)


GOLDILOCKS = (sys.executable, "-m", "goldilocks.cli")


def start(*command: str, folder: Path | None = None, **env: str) -> subprocess.Popen[str]:
    """Start a command offline, with this Python's commands first in its path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", **env}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, cwd=folder, text=True, **pipes)


def end(process: subprocess.Popen[str], runs: Path | None = None) -> tuple[int, str]:
    """Its status and everything that it said; of one that fails the ends of the logs below ``runs``, too."""
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    logs = runs.glob("**/log") if runs and process.returncode else ()
    return process.returncode, "\n".join([out + err, *(log.read_text(errors="replace")[-4000:] for log in logs)])


def run_scripted(script: str, folder: Path, runs: list[dict[str, Any]], processes: int = 1) -> str:
    """Make runs by a script of ``tests/``, one after the other, by itself or under accelerate; return what it said."""
    two = [
        *("-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
    ]
    files = [folder / f"options{place}.json" for place in range(len(runs))]
    for file, options in zip(files, runs, strict=True):
        Path(options["out"]).mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(options))
    words = [*(two if processes > 1 else []), "-m", script, *map(str, files)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = start(sys.executable, *words, PYTHONPATH=path, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    out, err = done.communicate(timeout=PATIENCE_S)
    assert done.returncode == 0, err[-4000:]
    return out


# For ``goldilocks train`` on it: updates of a few rollouts, where what is tested is everything around them.
SMALL = [
    "data.train_batch_size=8",
    "data.val_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=32",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from browser import start_browser

    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default task with few problems."""
    root = tmp_path_factory.mktemp("arithmetic")
    task = Arithmetic()
    write_split(root / "data", task.data_source, "train", task.problems("train", 64, 0))
    write_split(root / "data", task.data_source, "val", task.problems("val", 16, 0))
    shutil.copytree(tiny_model("arithmetic"), root / "model")
    return root


def processes_of(run: Path) -> list[str]:
    """How the commands begin of what is alive of a ``goldilocks train``; its reaper names the run in its own."""
    found, run = [], run.resolve()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if process.environ().get(supervisor.RUN) == str(run) or str(run) in command:
                found.append(" ".join(command[:3]))
    return found


def wait_for(run: Path, what: str, process: subprocess.Popen[str]) -> None:
    """Until the run has a process of this name."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(what in command for command in processes_of(run)):
        assert time.monotonic() < deadline, f"no {what} of {run.name}"
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)


def kill(process_name: str, once: Path | None = None) -> Callable[[Path], None]:
    """For ``launch(during=...)``: SIGKILL a process after the first training step, or once there is this file."""

    def during(log: Path) -> None:
        _wait(log, once.exists if once else lambda: "step:1 -" in log.read_text(errors="replace"))
        victims = [process for process in _processes(log.parent) if process_name in _command(process)]
        assert victims, f"no process {process_name!r}"
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    return during


def _wait(log: Path, for_what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not for_what():
        alive = time.monotonic() < deadline and _processes(log.parent)
        assert alive, "it did not come to that:\n" + log.read_text(errors="replace")[-5000:]
        time.sleep(0.5)


SETTINGS = {**platform_env("cpu"), "HF_HUB_OFFLINE": "1", "HYDRA_FULL_ERROR": "1", "RAY_DEDUP_LOGS": "0"}


def _environment(folder: Path) -> dict[str, str]:
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        **{key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"},
        **SETTINGS,
        "RAY_AUTH_TOKEN_PATH": str(token),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        supervisor.RUN: str(folder),
    }


def _overrides(task: Task, root: Path, folder: Path) -> list[str]:
    return [
        "+device=cpu",
        f"hydra.run.dir={folder}/hydra",
        f"data.train_files={task.train}",
        f"data.val_files={task.validation}",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={task.model}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        f"reward.custom_reward_function.path={task.reward}",
        "algorithm.adv_estimator=grpo",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={root}/checkpoints",
        "trainer.total_training_steps=2",
        "trainer.resume_mode=disable",
    ]


def _processes(folder: Path) -> list[psutil.Process]:
    return list(supervisor.processes_of(folder))


def _command(process: psutil.Process) -> str:
    """Its command line, empty where it has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _gone(folder: Path) -> bool:
    """Whether every process of a launch ends; Ray's last ones need a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while _processes(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End a launch that did not end itself. Ray's daemons have sessions of their own, so each is ended by its id."""
    for left in _processes(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


_PAIRS = [(a, b) for a in range(10) for b in range(10)]


def _row(index: int, a: int, b: int) -> dict[str, Any]:
    return {
        "data_source": "addition",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": index, "split": "train"},
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pandas as pd

    pd.DataFrame(rows).to_parquet(path)


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<user>", "<assistant>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *"0123456789+=? "])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}"
        "{% elif m['role'] == 'assistant' %}<assistant>{{ m['content'] }}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


def _warm_started(tokenizer: Any) -> Any:
    """A model that is sometimes right: rewards must be neither all 0 nor all 1."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    draw = random.Random(0)
    texts = [f"<user>{a}+{b}=<assistant>{a + b}<eos>" for a, b in _PAIRS]
    for _ in range(80):
        batch = tokenizer(draw.choices(texts, k=64), padding=True, return_tensors="pt", return_token_type_ids=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        labels[:, :6] = -100
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
