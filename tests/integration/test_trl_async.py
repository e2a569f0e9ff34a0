"""``GoldilocksAsyncGRPOTrainer`` trains: the tiny model on the CPU, TRL's own asynchronous trainer beside it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("goldilocks.trl.async_trainer", exc_type=ImportError)  # an older TRL has another one

import trl_async_world as asynchronous
import trl_world as world
from documented_metrics import undocumented
from peft import LoraConfig
from run_files import batches_of, json_lines
from trl.experimental.async_grpo import AsyncGRPOTrainer

from goldilocks.core import Exhausted
from goldilocks.runs.checkpoints import last_whole

from .conftest import run_scripted


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asynchronous.on_the_cpu(monkeypatch.setattr)


def run(out: Path, *, seeded: bool = True, resume: str | None = None, **chosen: Any) -> Any:
    with asynchronous.Server(seeded=seeded).running() as address:
        trainer = asynchronous.trainer(out, address, **chosen)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_with_everything_off_it_trains_what_trl_trains(tmp_path: Path) -> None:
    """One request at a time: the order of the answers is the order of the requests, however fast anything is."""
    chosen = {"max_inflight_tasks": 1, "max_staleness": 1000, "seeded": False, "gradient_accumulation_steps": 2}
    chosen |= {"per_device_train_batch_size": 4, "max_steps": 6}
    theirs = run(tmp_path / "theirs", kind=AsyncGRPOTrainer, **chosen)
    ours = run(tmp_path / "ours", sections={"goldilocks": {}}, **chosen)
    assert world.losses(ours) == pytest.approx(world.losses(theirs), rel=1e-4, abs=1e-7)
    assert torch.allclose(world.weights(ours), world.weights(theirs), atol=1e-6)
    assert any(world.losses(ours))


def half_flat() -> Any:
    """Return questions of which every other one is always answered right, so that its groups teach nothing."""
    return world.dataset(10).map(lambda row, place: {"right": 7 if place % 2 else row["right"]}, with_indices=True)


def test_dynamic_sampling_trains_full_batches_of_groups_that_differ(tmp_path: Path) -> None:
    chosen = {"sections": {"filter_groups": {"enable": True, "max_carry_steps": 3}, "gen_batch_size": 4}}
    trainer = run(tmp_path / "run", data=half_flat(), **chosen)
    taken = batches_of(tmp_path / "run")
    assert len(taken) >= 4  # the next one is taken while the last one is trained
    for groups in taken:
        assert len(groups) == 2
        for rows in groups.values():
            assert len({row["score"] for row in rows}) == 2
            assert sum(row["advantage"] for row in rows) == pytest.approx(0, abs=1e-5)
    logged = [record for record in trainer.state.log_history if "loss" in record]
    of = logged[-1]
    lines = [one["data"] for one in json_lines(tmp_path / "run" / "metrics.jsonl") if "timing_s/step" in one["data"]]
    for line, groups, record in zip(lines, taken[:4], logged, strict=True):  # of the batch that the update trained
        scores = [row["score"] for rows in groups.values() for row in rows]
        assert line["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
        assert line["timing_s/step"] >= record["perf/rollout_wait_s"] - 0.1  # the wait is part of it
        assert line["accounts/generated_rollouts"] == record["accounts/generated_rollouts"]
    assert of["accounts/filtered_rollouts"] > 0
    assert max(record["train/age_max"] for record in logged if "train/age_max" in record) <= 3
    world.assert_accounts_sum(of)
    assert not undocumented(trainer.collected.batch.metrics)


@pytest.mark.slow
def test_adaptive_groups_selectors_and_priors_train_in_micro_batches_of_any_size(tmp_path: Path) -> None:
    adaptive = {"enable": True, "max_n": 8, "rollouts_per_batch": 2, "min_rollouts": 2, "stop": "contrast"}
    policies = {"selector": "thompson", "prior": "strata", "strata": {"columns": ["right"]}}
    sections = {"adaptive_rollout": adaptive, "goldilocks": policies, "filter_groups": {"enable": True}}
    trainer = run(tmp_path / "run", data=half_flat(), sections=sections, token_budget=40, max_steps=6)
    sizes = {len(rows) for groups in batches_of(tmp_path / "run") for rows in groups.values()}
    assert max(sizes) <= 8
    assert trainer.state.global_step == 6
    assert any(world.losses(trainer))


def fails_on_the_third(completions: list[Any], prompts: list[Any], right: list[int], **_: Any) -> list[float]:
    if prompts[0][-1]["content"].startswith("3+"):
        raise RuntimeError("the grader is down")
    return world.reward(completions, right)


def test_a_rollout_whose_reward_fails_is_lost_and_the_run_goes_on(tmp_path: Path) -> None:
    trainer = run(tmp_path / "run", sections={"goldilocks": {}}, reward_funcs=fails_on_the_third)
    last = [record for record in trainer.state.log_history if "loss" in record][-1]
    assert last["accounts/failed_rollouts"] > 0
    assert last["accounts/failed_tokens"] >= last["accounts/failed_rollouts"]  # each was generated to its end
    assert all(
        row["input"] != "3+0=" for groups in batches_of(tmp_path / "run") for rows in groups.values() for row in rows
    )


def test_a_run_that_goes_on_trains_what_it_would_have_trained(tmp_path: Path) -> None:
    """Samples that were taken and not trained are in the checkpoint; what was in flight is generated again."""
    sections = {"filter_groups": {"enable": True, "max_carry_steps": 50}, "gen_batch_size": 4}
    chosen = {"sections": sections, "data": half_flat(), "max_inflight_tasks": 1, "max_steps": 6}
    whole = run(tmp_path / "run", save_strategy="steps", save_steps=2, **chosen)
    again = run(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-2"), **chosen)
    assert world.losses(again) == pytest.approx(world.losses(whole), rel=1e-3, abs=1e-6)
    assert len(set(world.losses(whole))) == 6
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "rollout_state.json").read_text())
    assert state["prompt_index"] == 4  # groups of two updates; what was taken ahead is trained, and counted, again


def test_an_adapter_gets_no_name_that_the_server_holds_of_an_earlier_run(tmp_path: Path) -> None:
    """A run ends, and another goes on from a checkpoint before its end, or begins anew without a section, beside it."""
    server, adapter = asynchronous.Server(seeded=True), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    chosen = {"peft_config": adapter, "save_strategy": "steps", "save_steps": 1, "max_steps": 2, "max_staleness": 2}
    ours = {"goldilocks": {}}
    with server.running() as address:
        for name, resume, sections in (("run", None, ours), ("run", "checkpoint-1", ours), ("new", None, {})):
            out = tmp_path / name
            trainer = asynchronous.trainer(out, address, sections=sections, **chosen)
            trainer.train(resume_from_checkpoint=resume and str(out / resume))
    assert server.adapters == [f"trl-policy-v{version}" for version in (6, 7, 8)]


class Alternates:
    """A reward of 1 and 0 in turn for the first prompts, whatever they are answered; 0 for the others."""

    __name__ = "alternates"

    def __init__(self, prompts: int) -> None:
        self._turns = {f"{one}+{one % 3}=": itertools.count() for one in range(prompts)}

    def __call__(self, completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
        turns = [self._turns.get(prompt[-1]["content"], itertools.repeat(0)) for prompt in prompts]
        return [float(next(turn) % 2) for turn in turns]


@pytest.mark.parametrize(("differ", "trained"), [(1, 0), (3, 1)])
def test_a_limit_that_leaves_too_few_groups_is_an_error_and_nothing_generated_is_lost(
    differ: int, trained: int, tmp_path: Path
) -> None:
    """Two groups are a batch: the last one that differs waits for a second."""
    out, limited = tmp_path / "run", {"enable": True, "max_carry_steps": 50, "max_num_gen_batches": 2}
    chosen = {"data": world.dataset(40), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    chosen |= {"max_inflight_tasks": 1}  # answers come in the order of the requests, on which the rewards hang
    sections = {"filter_groups": limited, "gen_batch_size": 2}
    with pytest.raises(Exhausted, match=rf"What was generated is saved in .*checkpoint-{trained}\."):
        run(out, sections=sections, reward_funcs=Alternates(differ), **chosen)
    whole = last_whole(out)
    assert whole == out / f"checkpoint-{trained}"
    sections = {**sections, "filter_groups": {**limited, "max_num_gen_batches": 0}}
    run(out, sections=sections, reward_funcs=Alternates(40), resume=str(whole), max_steps=trained + 1, **chosen)
    assert f"g{differ - 1}" in batches_of(out)[trained]


@pytest.mark.slow
def test_two_processes_train_one_batch_with_trls_own_child_process(tmp_path: Path) -> None:
    out, ended = tmp_path / "run", tmp_path / "ended"
    sections = {"filter_groups": {"enable": True, "max_carry_steps": 3}, "goldilocks": {"selector": "thompson"}}
    never = {"filter_groups": {"enable": True, "min_std": 9.0, "max_num_gen_batches": 2}}
    asynchronous.model_folder(tmp_path)
    with asynchronous.Server(seeded=True).running() as address:
        common = {"per_device_train_batch_size": 4, "max_steps": 3, "address": address}
        own = {out: sections, ended: never}
        runs = [{"out": str(folder), "sections": chosen, **common} for folder, chosen in own.items()]
        run_scripted("trl_async_script", tmp_path, runs, processes=2)
    first, second = (json.loads((out / f"seen{rank}.json").read_text()) for rank in range(2))
    errors = [json.loads((ended / f"seen{rank}.json").read_text())["error"] for rank in range(2)]
    assert f"What was generated is saved in {ended / 'checkpoint-0'}." in errors[0] == errors[1]
    assert last_whole(ended) == ended / "checkpoint-0"
    assert first["weights"] == second["weights"]
    assert any(first["losses"])
    last = [one["data"] for one in json_lines(out / "metrics.jsonl") if "timing_s/step" in one["data"]][-1]
    assert last["accounts/reward_calls"] >= last["accounts/trained_rollouts"] > 0  # by the judge, in the child
    for groups in batches_of(out):
        assert len(groups) == 2
        assert all(len({row["score"] for row in rows}) == 2 for rows in groups.values())
