"""The tiny models that are shipped: a tokenizer that loses nothing, and answers that are right sometimes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldilocks.cli import main
from goldilocks.tasks.arithmetic import Arithmetic
from goldilocks.tasks.tiny_model import ARITHMETIC, TINY, build, character_tokenizer, tiny_model
from goldilocks.tasks.warm_start import encode

TOKENIZER = character_tokenizer()


@given(st.text(ARITHMETIC, max_size=20))
def test_the_tokenizer_gives_back_what_it_was_given(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_a_prompt_is_its_characters_and_two_tokens_and_every_problem_of_the_task_fits_the_recipe():
    prompt, answer = encode(TOKENIZER, "12+34=", "46")
    assert TOKENIZER.decode(prompt) == "<|user|>12+34=<|assistant|>"
    assert len(prompt) == 8
    assert TOKENIZER.decode(answer) == "46<|im_end|>"
    for problem in Arithmetic().problems("train", 2048, 0):
        prompt, answer = encode(TOKENIZER, problem.question, problem.answer)
        assert len(prompt) <= 16
        assert len(answer) <= 8


def test_the_same_seed_builds_the_same_model():
    first, second, other = (build(TOKENIZER, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("task", TINY)
def test_a_model_is_copied_out_whole(task, tmp_path, capsys):
    assert main(["model", "make", "--task", task, "--out", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model'}\n"
    shipped = {file.name: file.read_bytes() for file in tiny_model(task).iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == shipped
    assert {"seed", "steps", "torch"} <= json.loads(shipped["made.json"]).keys()
    assert {name.rpartition(".")[2] for name in shipped} == {"json", "safetensors"}


def test_a_model_in_the_package_is_used_by_its_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("arithmetic"))
    for text in ("12-3=", "-7", " ", "\n"):  # verl wants the newline of a Qwen model to be one token
        assert tokenizer.encode(text) == TOKENIZER.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False) == "<|user|>1+1="


def test_the_arithmetic_model_knows_sums_without_a_carry_and_forgets_carries():
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("arithmetic"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model("arithmetic"))
    questions = [f"{a}+{b}=" for a in range(1, 10) for b in range(1, 10) if a + b < 10]
    questions += [f"{a}{b}+{c}=" for a in range(2, 9) for b in (6, 7, 8) for c in (5, 6, 7)]
    prompts = [encode(tokenizer, question, "")[0] for question in questions]
    longest = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = (ids != tokenizer.pad_token_id).long()
    answers = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)[:, longest:]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [text == str(eval(question[:-1])) for text, question in zip(texts, questions, strict=True)]
    assert sum(right[:36]) >= 30
    assert sum(right[36:]) <= 21
