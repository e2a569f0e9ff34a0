"""A small world for TRL: the tiny model, untrained, sums of one digit, and a reward that some answers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from goldilocks.tasks.tiny_model import build, character_tokenizer
from goldilocks.trl import GoldilocksGRPOTrainer
from goldilocks.trl.rows import SAMPLED
from goldilocks.types import Account

QUESTIONS = 24
ARGUMENTS = ("peft_config", "eval_dataset", "callbacks", "tools", "environment_factory", "rollout_func")  # its own

# Sections of a run that chooses and filters, and carries groups to later batches.
CARRYING = {
    "filter_groups": {"enable": True, "max_carry_steps": 2},
    "goldilocks": {"selector": "thompson"},
    "gen_batch_size": 8,
}
# Arguments of every trainer that is tested: a short run on the CPU that reports to nobody and saves nothing by itself.
QUIET: dict[str, Any] = {
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 3,
}


def dataset(size: int = QUESTIONS) -> Dataset:
    """Return questions that differ in difficulty: of seven kinds of answer, one to six are right."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{one}+{one % 3}="}], "right": 1 + one % 6} for one in range(size)]
    )


def reward(completions: list[Any], right: list[int], **_: Any) -> list[float]:
    """Return 1 for an answer of a right kind; the untrained model's answers are of all kinds."""
    answers = [one[0]["content"] for one in completions]
    return [float(sum(map(ord, answer)) % 7 < kinds) for answer, kinds in zip(answers, right, strict=True)]


def every_third(completions: list[Any], right: list[int], **_: Any) -> list[float]:
    """Return 1 for every third answer, of half the questions alone: what is dropped and carried hangs on no answer."""
    return [float(place % 3 == 2 and kinds > 3) for place, kinds in enumerate(right)]


def arguments(out: Path, kind: type[Any] = GRPOConfig, **chosen: Any) -> Any:
    """Return a config for the CPU: four groups of four a batch."""
    defaults: dict[str, Any] = {
        "output_dir": str(out),
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        **QUIET,
    }
    return kind(**{**defaults, **chosen})


def trainer(out: Path, *, ours: Any = True, sections: Any = None, data: Any = None, **chosen: Any) -> GRPOTrainer:
    """Return a trainer of the tiny model; ``sections`` are ours, the rest goes to ``GRPOConfig``."""
    tokenizer = chosen.pop("processing_class", None) or character_tokenizer()
    model: Any = chosen.pop("model", None) or build(tokenizer, seed=0)
    if chosen.get("beta"):  # TRL loads the reference model from where the model came from
        model.save_pretrained(out / "model")
        model = str(out / "model")
    kind = ours if isinstance(ours, type) else GoldilocksGRPOTrainer if ours else GRPOTrainer
    config = RLOOConfig if issubclass(kind, RLOOTrainer) else GRPOConfig
    extra = {name: chosen.pop(name) for name in ARGUMENTS if name in chosen}
    return kind(
        model=model,
        reward_funcs=chosen.pop("reward_funcs", reward),
        args=arguments(out, config, **chosen),
        train_dataset=dataset() if data is None else data,
        processing_class=tokenizer,
        **extra,
        **(sections or {}),
    )


def run(out: Path, sections: Any = None, resume: Any = None, **chosen: Any) -> Any:
    """Train to the end; return the trainer."""
    one = trainer(out, sections=sections, **chosen)
    one.train(resume_from_checkpoint=resume)
    return one


def assert_same_training(ours: Any, theirs: Any) -> None:
    """Both have gone the same way: prompts and completions, losses and weights."""
    for column in ("prompt", "completion"):
        assert list(ours._logs[column]) == list(theirs._logs[column])
    assert list(ours._logs["advantages"]) == pytest.approx(list(theirs._logs["advantages"]), abs=1e-5)
    assert losses(ours) == losses(theirs)
    assert torch.equal(weights(ours), weights(theirs))
    assert any(losses(ours))


def assert_accounts_sum(metrics: dict[str, float]) -> None:
    """Every rollout that was generated is in one account."""
    found = [metrics[f"accounts/{account}_rollouts"] for account in Account]
    assert sum(found) == metrics["accounts/generated_rollouts"]


def engine_errors(one: Any) -> list[float]:
    """Return a list that every later round adds to.

    It has for each answer how far the log-probs that the engine returned are from the model's own, tools' tokens left
    out.
    """
    generate, errors = one._generate_round, []

    def generated(*args: Any) -> Any:
        made = generate(*args)
        for own, row in zip(one._log_probs(made[1]), made[1], strict=True):
            errors.append(float(((own - row.tensors[SAMPLED]) * row.tensors.get("tool_mask", 1)).abs().max()))
        return made

    one._generate_round = generated
    return errors


def rows_of(one: Any) -> list[Any]:
    """Return a list that every row of a later round is added to."""
    generate, rows = one._generate_round, []

    def generated(*args: Any) -> Any:
        made = generate(*args)
        rows.extend(made[1])
        return made

    one._generate_round = generated
    return rows


def collect(one: Any) -> None:
    """Have the trainer put its next batch together."""
    one.model.train()
    one.collection.collect(one._generate_round, one._log_probs, one._rewards())


def losses(one: GRPOTrainer) -> list[float]:
    """Return the loss of each step, as TRL logged it."""
    return [record["loss"] for record in one.state.log_history if "loss" in record]


def weights(one: GRPOTrainer) -> torch.Tensor:
    """Return every parameter, as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()])
