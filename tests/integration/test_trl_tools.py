"""TRL's tools and environments with our sections: the tiny model calls a tool wherever it writes a digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import trl_world as world
from datasets import Dataset
from documented_metrics import undocumented

from goldilocks.tasks.tiny_model import ASSISTANT, END, USER, build, character_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}" + END
    + "{% else %}" + USER + "{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)  # fmt: skip
CALL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"const": "double"},
                "arguments": {"type": "object", "properties": {"digit": {"type": "integer"}}},
            },
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string", "x-regex": "^([^<]*)"},
        "tool_calls": {"type": "array", "x-regex-iterator": "^[^0-9<]*([0-9])", "items": CALL},
    },
}
ENDS = "+-*=\n"  # the untrained model would seldom end a turn by itself


def double(digit: int) -> str:
    """Return twice a digit.

    Args:
        digit: The digit.
    """
    return f"{2 * digit}="


class Counter:
    """An environment: it starts at a number that the data has, and its tool doubles and counts."""

    def reset(self, right: int, **_: Any) -> str:
        self.calls = 0
        return f"{right}="

    def double(self, digit: int) -> str:
        """Return twice a digit.

        Args:
            digit: The digit.
        """
        self.calls += 1
        return f"{2 * digit}="

    def get_reward(self) -> float:
        return float(self.calls % 2)


def right_length(completions: list[Any], right: list[int], **_: Any) -> list[float]:
    """Return 1 where the conversation's length is of a right kind."""
    lengths = [sum(len(str(message["content"])) for message in one) for one in completions]
    return [float(length % 7 < kinds) for length, kinds in zip(lengths, right, strict=True)]


@pytest.fixture(autouse=True)
def _parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL asks for jmespath, which the parser needs for schemas other than this one."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.is_jmespath_available", lambda: True)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def trainer(out: Path, sections: dict[str, Any] | None = None, ours: bool = True, **chosen: Any) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, SCHEMA
    model = build(tokenizer, seed=0)
    ends = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(one))[0] for one in ENDS]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    if "environment_factory" not in chosen:
        chosen = {"tools": [double], "reward_funcs": right_length, **chosen}
    defaults = {"max_completion_length": 24, "max_tool_calling_iterations": 2, "max_steps": 2}
    options = {"processing_class": tokenizer, "model": model, **defaults, **chosen}
    return world.trainer(out, ours=ours, sections=sections, **options)


def test_with_everything_off_it_trains_what_trl_trains(tmp_path: Path) -> None:
    theirs = trainer(tmp_path / "theirs", ours=False)
    theirs.train()
    ours = trainer(tmp_path / "ours", {"goldilocks": {}})
    rows = world.rows_of(ours)
    ours.train()
    world.assert_same_training(ours, theirs)
    assert any(row.tool_tokens for row in rows)


@pytest.mark.parametrize("engine", [{}, {"engine_slots": 8}], ids=["generate", "engine"])
def test_tools_tokens_are_not_generated_and_not_trained(engine: dict[str, Any], tmp_path: Path) -> None:
    """Also where TRL masks truncated answers as a whole: they were generated all the same."""
    sections = {"filter_groups": {"enable": True, "max_carry_steps": 2}, "gen_batch_size": 8, **engine}
    one = trainer(tmp_path, sections, mask_truncated_completions=True, max_steps=3)
    rows = world.rows_of(one)
    one.train()
    last = [record for record in one.state.log_history if "loss" in record][-1]
    assert any(row.tool_tokens for row in rows)
    assert any(row.truncated for row in rows)
    assert last["accounts/generated_tokens"] == sum(
        len(row.tensors["completion_ids"]) - row.tool_tokens for row in rows
    )
    assert last["accounts/tool_tokens"] == sum(row.tool_tokens for row in rows)
    assert last["train/rollout_failures"] == 0
    assert not undocumented(last)
    whole = [row for row in rows if row.tensors["completion_mask"].any()]
    assert all(int((row.tensors["tool_mask"] == 0).sum()) == row.tool_tokens for row in whole)
    for group in one.collection.batch.groups:
        assert len(set(group.rewards)) == 2


def test_the_engine_answers_every_turn_with_the_weights_of_now(tmp_path: Path) -> None:
    one = trainer(tmp_path, {"goldilocks": {}, "engine_slots": 8})
    errors, rows = world.engine_errors(one), world.rows_of(one)
    one.train()
    assert max(errors) < 1e-4
    assert max(len(row.completion) for row in rows) >= 3  # a call, its answer, and what was written after it
    texts = [str(row) for row in one._logs["completion"]]
    assert len(set(texts)) > len(texts) / 2  # conversations of one prompt have noise of their own


def test_an_environment_rewards_its_own_rollout_and_a_run_goes_on(tmp_path: Path) -> None:
    chosen = {"environment_factory": Counter, "reward_funcs": None, "max_steps": 4}
    one = trainer(tmp_path, world.CARRYING, save_strategy="steps", save_steps=2, **chosen)
    rows = world.rows_of(one)
    one.train()
    calls = [sum(message["role"] == "tool" for message in row.completion) for row in rows]
    assert any(calls)
    assert any(row.tool_tokens for row in rows)
    again = trainer(tmp_path, world.CARRYING, **chosen)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert world.losses(again) == pytest.approx(world.losses(one), rel=1e-3, abs=1e-6)


def test_several_environments_train_rows_that_have_no_prompt(tmp_path: Path) -> None:
    """What an environment is reset with tells its prompts apart."""

    class Backwards(Counter):
        def reset(self, right: int, **_: Any) -> str:
            self.calls = 0
            return f"={right}"

    rows = [{"environment": ("counter", "backwards")[number % 2], "right": number // 2} for number in range(16)]
    chosen = {"environment_factory": {"counter": Counter, "backwards": Backwards}, "reward_funcs": None}
    sections = {"filter_groups": {"enable": True}, "goldilocks": {"selector": "thompson"}, "gen_batch_size": 8}
    one = trainer(tmp_path, sections, data=Dataset.from_list(rows), **chosen)
    made = world.rows_of(one)
    one.train()
    asked = {row.prompt[-1]["content"] for row in made}
    assert {True, False} == {text.startswith("=") for text in asked}
    assert len(asked) >= 8
    assert one.state.global_step == 2
