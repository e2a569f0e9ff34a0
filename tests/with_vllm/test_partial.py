"""``on_full: partial`` on vLLM, by its checkpoints: a rollout that paused went on from its prefix after the update.

The checkpoint of a step holds the weights after it and what every unfinished rollout had been answered in it. So each
token that vLLM wrote can be looked at again with the weights that it says it was written with. Gate 2 rejects some rows
in the same run, and what it rejects is refilled. The answers to one prompt in ten end only at their limit: however fast
vLLM is beside the trainer, they pause and go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from endless import make_endless

pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM, AutoTokenizer

from goldilocks.verl.dispatch.answers import ResumableAnswer, name_of
from goldilocks.verl.store import load_rows

from .conftest import Train, log_probs, steps
from .words_task import QUESTIONS, make_task

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2400)]

MEAN, LONGEST = 192, 4096  # tokens of an answer that ends by itself, and of one that does not
STEPS = 6
ENDLESS = ["w3", "w11"]  # the first words of prompts whose answers do not end by themselves
Rollout = tuple[str, int]  # its group and its number in it


def test_paused_rollouts_go_on_and_each_token_keeps_its_log_prob_and_its_version(train: Train, tmp_path: Path) -> None:
    settings = make_task(tmp_path, MEAN, LONGEST)
    make_endless(tmp_path / "model", ENDLESS)
    process = train(
        *("dapo", *settings, "algorithm.filter_groups.metric=acc", "algorithm.filter_groups.on_full=partial"),
        *("algorithm.filter_groups.max_carry_steps=8", "actor_rollout_ref.rollout.n=4"),
        # Of eight groups that are written at once two are a batch, and the fourth is of a prompt with endless answers.
        *("data.train_batch_size=2", "data.gen_batch_size=8", "data.shuffle=false"),
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        *("actor_rollout_ref.actor.optim.lr=3e-4", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1"),
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        *("batch_filter.enable=true", "batch_filter.enable_two_gate_filter=true"),
        "batch_filter.gate2_instability_threshold=-0.85",  # all tokens are about equally likely: some rows lose
    )
    _, err = process.communicate()
    assert process.returncode == 0, err
    run = tmp_path / "test"
    logged = steps(run)
    for step in logged.values():
        assert step["train/groups_expired"] == 0
        assert step["aborts/left"] == 0
        assert step["filter/gate1_rejection_rate"] == 0  # on what the newest weights wrote, both agree
        assert step["filter/gate2_missing_tensors"] == 0  # the largest log-probs of every part are there
        assert step["train/informative_groups"] == 2
    assert max(step["train/rollouts_paused"] for step in logged.values()) > 0
    assert max(step.get("train/stale_tokens", 0) for step in logged.values()) > 0
    assert 0 < logged[STEPS]["aborts/tokens"] < LONGEST * logged[STEPS]["aborts/ended"]  # inside the engine
    assert logged[STEPS]["accounts/rejected_rollouts"] > 0

    checkpoints = [run / "checkpoints" / f"global_step_{step}" for step in range(1, STEPS + 1)]
    answers = [unfinished(checkpoint) for checkpoint in checkpoints]
    went_on = [
        (version, before, after)
        for version, saved in enumerate(itertools.pairwise(answers), start=1)
        for before, after in both(*saved)
        if 0 < len(before.token_ids) < len(after.token_ids)
    ]
    assert went_on
    for version, before, after in went_on:
        written = len(before.token_ids)
        assert after.token_ids[:written] == before.token_ids
        assert after.output().log_probs[:written] == before.output().log_probs
        assert after.versions == [*before.versions, [version, len(after.token_ids) - written]]
    policies = [tmp_path / "model", *(checkpoint / "actor" / "huggingface" for checkpoint in checkpoints)]
    check_log_probs([after for _, _, after in went_on], policies)


def unfinished(checkpoint: Path) -> dict[Rollout, ResumableAnswer]:
    """What each unfinished rollout has been answered."""
    (folder,) = checkpoint.rglob("unfinished")
    return {(uid, index): ResumableAnswer.from_state_dict(answer) for uid, index, answer in load_rows(folder)}


def both(
    before: dict[Rollout, ResumableAnswer], after: dict[Rollout, ResumableAnswer]
) -> Iterator[tuple[ResumableAnswer, ResumableAnswer]]:
    return ((answer, after[rollout]) for rollout, answer in before.items() if rollout in after)


def check_log_probs(answers: list[ResumableAnswer], folders: list[Path]) -> None:
    """Each token has the log-prob that the policy of its version gives it, and not what the policy after it gives."""
    policies = [load(folder) for folder in folders]
    prompts = {name_of(ids): ids for ids in prompt_ids(folders[0])}
    differences = np.array([[*of_own_and_next(answer, prompts[answer.prompt], policies)] for answer in answers])
    own, later = differences.T
    assert own.max() < 1e-4
    assert later.min() > own.max()


def of_own_and_next(answer: ResumableAnswer, prompt: list[int], policies: list[Any]) -> Iterator[float]:
    """The largest difference to the log-probs of the policy that wrote each token, and to those of the one after it."""
    by = torch.stack([log_probs(policy, prompt, answer.token_ids) for policy in policies])
    version = torch.tensor([version for version, count in answer.versions for _ in range(count)])
    stored, place = torch.tensor(answer.output().log_probs), torch.arange(len(version))
    yield from (float((by[one, place] - stored).abs().max()) for one in (version, version + 1))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def prompt_ids(model: Path) -> list[list[int]]:
    """Every prompt of the task, as the model is asked it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
