"""What ``scripts/faults.py`` checks of a run's directory: it finds each fault, and none in a run that has none."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import faults
import psutil
import pytest

from goldilocks.runs.checkpoints import save_state
from goldilocks.types import Account


class History:
    """A run of two steps as it lies on disk: two groups of two rollouts each, the second of them carried for a step."""

    def __init__(self, run: Path, checkpoint: str) -> None:
        self.run = run
        self.checkpoint = checkpoint  # what the folders of verl or of TRL are called
        self.trained = {1: ["g0"], 2: ["g1"]}
        self.kept: dict[int, list[str]] = {1: ["g1"], 2: []}
        accounts = dict.fromkeys([account.value for account in Account], 0)
        self.accounts: dict[int, dict[str, int]] = {
            1: {**accounts, "trained": 2, "carried": 2, "generated": 4},
            2: {**accounts, "trained": 4, "generated": 4},
        }

    def write(self) -> Path:
        (self.run / "rollouts").mkdir(parents=True)
        lines = [{"step": step, "data": self._metrics(step)} for step in self.accounts]
        (self.run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step, uids in self.trained.items():
            rows = [self._row(step, f"{uid}_{index}_0") for uid in uids for index in range(2)]
            dump = "".join(json.dumps(row) + "\n" for row in [*rows, self._row(step, "pad0_0_0")])
            (self.run / "rollouts" / f"{step}.jsonl").write_text(dump)
            folder = self.run / "checkpoints" / f"{self.checkpoint}{step}"
            folder.mkdir(parents=True)
            judged = {"kept": [{"uid": uid} for uid in self.kept[step]]}
            accounts = {"rollouts": {"trained": 2 * step}}
            save_state({"collector": {"judged": judged, "accounts": accounts}}, folder / "goldilocks.npz")
        return self.run

    def _metrics(self, step: int) -> dict[str, int]:
        return {f"accounts/{name}_rollouts": count for name, count in self.accounts[step].items()}

    def _row(self, step: int, uid: str) -> dict[str, Any]:
        return {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": step, "uid": uid}


@pytest.fixture(params=["global_step_", "checkpoint-"], ids=["verl", "trl"])
def history(tmp_path: Path, request: pytest.FixtureRequest) -> History:
    return History(tmp_path / "run", request.param)


def found(run: Path, killed_after: tuple[int, ...] = ()) -> dict[str, int]:
    return {name: len(lines) for name, lines in faults.history_faults(run, 2, killed_after).items() if lines}


def test_a_whole_run_has_no_faults(history: History) -> None:
    assert found(history.write()) == {}


def test_of_a_run_on_trl_the_last_whole_checkpoint_counts(tmp_path: Path) -> None:
    run = History(tmp_path / "run", checkpoint="checkpoint-").write()
    assert (faults.checkpointed(run), faults.is_saving(run)) == (0, True)
    (run / "checkpoints" / "checkpoint-1" / "trainer_state.json").write_text("{}")
    assert (faults.checkpointed(run), faults.is_saving(run)) == (1, True)
    (run / "checkpoints" / "checkpoint-2" / "trainer_state.json").write_text("{}")
    assert (faults.checkpointed(run), faults.is_saving(run)) == (2, False)


def test_a_group_in_two_steps_was_trained_twice(history: History) -> None:
    history.trained[2] = ["g0"]
    history.kept[2] = ["g1"]
    assert found(history.write()) == {"groups trained twice": 1}


def test_a_kept_group_that_is_neither_trained_nor_kept_is_lost(history: History) -> None:
    history.trained[2] = ["g2"]
    assert found(history.write()) == {"kept groups lost": 1}


@pytest.mark.parametrize("left", [None, "", '{"input": "1+1='])
def test_a_life_that_was_killed_before_its_dump_has_trained_what_its_checkpoint_no_longer_carries(
    history: History, left: str | None
) -> None:
    run = history.write()
    dump = run / "rollouts" / "2.jsonl"
    dump.unlink() if left is None else dump.write_text(left)
    assert found(run, killed_after=(2,)) == {}
    assert found(run, killed_after=(1,)) == {"kept groups lost": 1, "accounts that do not go on": 1}


@pytest.mark.parametrize("change", [{"trained": 2}, {"generated": 5}])
def test_accounts_that_begin_anew_or_do_not_sum_are_found(history: History, change: dict[str, int]) -> None:
    history.accounts[2] |= change
    assert set(found(history.write())) == {"accounts that do not go on"}


def life(victim: str, **changes: Any) -> Any:
    known = {"training": True, "moment": 1.0, "first": 0, "last": 2, "reason": "the run failed: ", "left_running": 0}
    return faults.Life(victim=victim, seconds=60.0, **{**known, **changes})


def campaign(out: Path, lives: list[Any], found: dict[str, list[str]] | None) -> Path:
    out.mkdir()
    (out / "lives.jsonl").write_text("".join(json.dumps(vars(one)) + "\n" for one in lives))
    if found is not None:
        (out / "checks.json").write_text(json.dumps({"steps": 4, "faults": found}))
    return out


def test_the_tables_of_several_campaigns_are_summed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives = [life("driver"), life("server", training=False)]
    whole = {"groups trained twice": [], "kept groups lost": []}
    assert faults.summary([campaign(tmp_path / name, lives, whole) for name in "ab"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["driver", "2", "2", "4", "60", "s"] in lines
    assert ["server", "2", "0", "4", "60", "s"] in lines
    assert ["all", "4", "2", "8", "60", "s"] in lines
    assert ["kept", "groups", "lost", "0"] in lines


def test_one_fault_or_a_campaign_that_did_not_end_is_enough_to_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = campaign(tmp_path / "a", [life("worker")], {"kept groups lost": []})
    bad = campaign(tmp_path / "b", [life("worker")], {"kept groups lost": ["g7 of step 3"]})
    assert faults.summary([good, bad]) == 1
    assert "g7 of step 3" in capsys.readouterr().out
    assert faults.summary([good, campaign(tmp_path / "c", [life("worker")], None)]) == 1


def test_a_campaign_that_is_interrupted_goes_on_with_the_lives_of_its_seed(tmp_path: Path) -> None:
    lives = [life("driver"), life("server")]
    assert faults.lives_of(tmp_path) == []
    assert faults.lives_of(campaign(tmp_path / "a", lives, None)) == lives
    assert faults.plan(1, 2, 20.0) == faults.plan(1, 2, 20.0)
    assert len({faults.plan(1, number, 20.0) for number in range(20)}) == 20
    assert {faults.plan(seed, 0, 20.0).victim for seed in range(50)} == set(faults.VICTIMS)
    on_trl = {faults.plan_on_trl(1, number, 20.0) for number in range(20)}
    assert on_trl == {faults.plan_on_trl(1, number, 20.0) for number in range(20)}
    assert {one.victim for one in on_trl} == {"trainer"}
    assert {(one.training, one.saving) for one in on_trl} == {(False, False), (True, False), (True, True)}


def test_the_reason_is_the_line_that_names_it_whatever_libraries_print_before() -> None:
    error = (
        "Writing model shards:   0%|   | 0/1\ngoldilocks: the run failed: ActorDiedError\ngoldilocks: everything: log\n"
    )
    assert faults.named(error) == "goldilocks: the run failed: ActorDiedError"
    assert faults.named("") == ""


def test_a_process_that_changes_its_name_after_it_was_seen_is_killed_all_the_same() -> None:
    process = subprocess.Popen(["bash", "-c", "read; exec sleep 600"], stdin=subprocess.PIPE)
    seen = psutil.Process(process.pid)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    while "bash" in seen.cmdline():
        time.sleep(0.01)
    assert faults.killed(seen)
    assert process.wait() == -signal.SIGKILL
    assert not faults.killed(seen)
