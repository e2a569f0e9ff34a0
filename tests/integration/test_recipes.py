"""Every script of ``recipe/`` and ``examples/`` in its tiny form, for real: verl on Ray on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from documented_metrics import undocumented
from omegaconf import OmegaConf
from run_files import logged
from unit.launch.test_recipes import GSPO_3B, differing, printed

from goldilocks.runs.records import group_uid, read_records

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
GSPO = ROOT / "recipe/gspo"
# One update of a few rollouts: that the scripts train at all, and what, is what is shown here.
SMALL = [
    "data.train_batch_size=4",
    "data.gen_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.max_num_seqs=64",
]
ONE_UPDATE = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
COMPARISON = "examples/grpo_trainer/run_adaptive_vs_baseline_comparison.sh"


@dataclass(frozen=True)
class Trained:
    """What a script left in its run directory."""

    metrics: dict[str, float]
    groups: dict[str, list[float]]  # the scores of every group that was trained


def bash(script: str, *words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script with ``MODEL=tiny``, from a folder of the test's own."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / script), *words],
        cwd=folder,
        env={**os.environ, "PATH": path, "MODEL": "tiny", "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(script: str, *words: str, folder: Path) -> Trained:
    bash(script, *words, "--name", "test", *SMALL, *ONE_UPDATE, folder=folder)
    run = folder / "runs" / "test"
    groups: dict[str, list[float]] = defaultdict(list)
    for row in read_records(run / "rollouts"):
        if not (uid := group_uid(row)).startswith("pad"):
            groups[uid].append(float(str(row["score"])))
    metrics = logged(run)[-1]
    assert undocumented(metrics) == []
    return Trained(metrics, dict(groups))


@pytest.mark.slow
def test_gspo_validates_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipe/gspo/validate_implementation.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0].split() for line in done.stdout.splitlines()] == [
        ["ok", "files"],
        ["ok", "config"],
        ["ok", "collector"],
        ["ok", "training"],
    ]


@pytest.mark.slow
def test_gspo_without_dynamic_sampling_trains_every_group(tmp_path: Path) -> None:
    trained = train("recipe/gspo/test_gspo_3b_math.sh", folder=tmp_path)
    assert len(trained.groups) == 4
    assert all(len(scores) == 16 for scores in trained.groups.values())
    assert trained.metrics["accounts/filtered_rollouts"] == 0
    assert trained.metrics["train/filtered_prompts_ratio"] == 1
    assert 0.9 < trained.metrics["actor/seq_importance_ratio"] < 1.1


@pytest.mark.slow
def test_dapo_filters_on_accuracy_and_charges_length(tmp_path: Path) -> None:
    # From the first token on, so that every answer is charged for its length and the charge shows.
    shaped = "reward.reward_kwargs.overlong_buffer_cfg.len=12"
    trained = train("recipe/dapo/dapo_3b_math.sh", shaped, folder=tmp_path)
    assert len(trained.groups) == 4
    for scores in trained.groups.values():
        right, wrong = [score for score in scores if score > 0], [score for score in scores if score < 0]
        assert right, "a group without a right answer was trained"
        assert wrong, "a group without a wrong answer was trained"
        assert max(right) < 1


@pytest.mark.slow
@pytest.mark.parametrize("which", ["adaptive", "baseline"])
def test_each_side_of_the_comparison_trains_alone(which: str, tmp_path: Path) -> None:
    words = ["adaptive_rollout.max_n=8"] if which == "adaptive" else []
    trained = train(COMPARISON, which, *words, folder=tmp_path)
    sizes = [len(scores) for scores in trained.groups.values()]
    assert len(sizes) == 4
    assert trained.metrics["accounts/trained_rollouts"] == sum(sizes)
    if which == "baseline":
        assert set(sizes) == {5}
    else:
        assert all(2 <= size <= 8 for size in sizes)
        assert all(max(scores) == 1 or len(scores) == 8 for scores in trained.groups.values())


@pytest.mark.parametrize(
    "command",
    [["bash", f"{GSPO}/gspo_dynamic_sampling_3b_math.sh"], [sys.executable, f"{GSPO}/main_gspo_dynamic.py"]],
    ids=["shell", "python"],
)
def test_a_script_shows_its_config_and_leaves_nothing(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.delenv("GSM8K", raising=False)
    monkeypatch.setenv("HOME", "/elsewhere")
    shown = printed([*command, "device=cuda", "--cfg", "job"], tmp_path, Path(sys.executable).parent)
    assert differing(OmegaConf.create(yaml.safe_load(shown)), GSPO_3B) == {}
    assert list(tmp_path.iterdir()) == []
