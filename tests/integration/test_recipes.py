"""The scripts of ``recipe/`` in their tiny form, for real: verl on Ray on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from documented_metrics import undocumented
from omegaconf import OmegaConf
from run_files import logged
from unit.launch.test_recipes import GSPO_3B, differing, printed

from .conftest import end, start
from .killed import trained_groups

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


@pytest.mark.slow
def test_gspo_validates_itself(tmp_path: Path) -> None:
    status, said = end(start(sys.executable, str(GSPO / "validate_implementation.py"), folder=tmp_path))
    assert status == 0, said
    checks = [line.split(":")[0].split() for line in said.splitlines() if line.startswith("ok")]
    assert checks == [["ok", "files"], ["ok", "config"], ["ok", "collector"], ["ok", "training"]]


@pytest.mark.slow
def test_dapo_filters_on_accuracy_and_charges_length(tmp_path: Path) -> None:
    # From the first token on, so that every answer is charged for its length and the charge shows.
    shaped = "reward.reward_kwargs.overlong_buffer_cfg.len=12"
    words = [str(ROOT / "recipe/dapo/dapo_3b_math.sh"), shaped, "--name", "test", *SMALL, *ONE_UPDATE]
    status, said = end(start("bash", *words, folder=tmp_path, MODEL="tiny"), tmp_path)
    assert status == 0, said
    groups = trained_groups(tmp_path / "runs" / "test" / "rollouts", 1)
    assert undocumented(logged(tmp_path / "runs" / "test")[-1]) == []
    assert len(groups) == 4
    for scores in groups.values():
        right, wrong = [score for score in scores if score > 0], [score for score in scores if score < 0]
        assert right, "a group without a right answer was trained"
        assert wrong, "a group without a wrong answer was trained"
        assert max(right) < 1


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
