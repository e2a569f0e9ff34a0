"""The tiny model: a tokenizer that loses nothing, lessons that are never validation problems, and Muon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.tasks.arithmetic import Arithmetic, lessons, slip, split_key
from goldilocks.tasks.model_command import histogram
from goldilocks.tasks.registry import split_of
from goldilocks.tasks.tiny_model import (
    ARITHMETIC,
    build,
    character_tokenizer,
    encode,
    make,
    orthogonal,
    pass_rates,
    warm_start,
)

TOKENIZER = character_tokenizer()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a busy machine wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@given(st.text(ARITHMETIC, max_size=20))
def test_the_tokenizer_gives_back_what_it_was_given(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_a_prompt_is_its_characters_and_two_tokens():
    prompt, answer = encode(TOKENIZER, "12+34=", "46")
    assert TOKENIZER.decode(prompt) == "<|user|>12+34=<|assistant|>"
    assert len(prompt) == 8
    assert TOKENIZER.decode(answer) == "46<|im_end|>"


def test_every_problem_of_the_task_fits_the_recipe():
    for problem in Arithmetic().problems("train", 2048, 0):
        prompt, answer = encode(TOKENIZER, problem.question, problem.answer)
        assert len(prompt) <= 16
        assert len(answer) <= 8


@pytest.mark.parametrize(("question", "answer"), [("47+5=", "42"), ("43-5=", "48"), ("41+5=", "46"), ("48-5=", "43")])
def test_a_slip_forgets_the_carry_and_nothing_else(question, answer):
    assert slip(question) == answer


def test_no_lesson_is_a_validation_problem_and_some_are_wrong():
    drawn = list(islice(lessons(random.Random(0)), 500))
    assert all(split_of(split_key(problem.question)) == "train" for problem in drawn)
    truths = {str(eval(problem.question.rstrip("="))) == problem.answer for problem in drawn}
    assert truths == {True, False}


def test_the_same_seed_builds_the_same_model():
    first, second, other = (build(TOKENIZER, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_lessons_lower_the_loss():
    model = build(TOKENIZER, 0)
    told: list[int] = []
    loss = warm_start(model, lambda *turn: encode(TOKENIZER, *turn), seed=0, steps=12, told=told.append)
    assert told == list(range(1, 13))
    assert loss < 3.2  # it starts at 3.3, which is what guessing among all tokens costs


def test_the_saved_model_loads_and_answers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make(tmp_path, steps=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    rates = pass_rates(model, tokenizer, Arithmetic().problems("train", 4, 0), samples=2)
    assert len(rates) == 4
    for text in ("12-3=", "-7", " ", "\n"):  # verl wants the newline of a Qwen model to be one token
        assert tokenizer.encode(text) == TOKENIZER.encode(text)
        assert len(tokenizer.encode(text)) == len(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False) == "<|user|>1+1="


@given(st.integers(0, 1000), st.sampled_from([(4, 4), (8, 3), (3, 8)]))
def test_muon_moves_every_singular_value_close_to_one(seed, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonal(matrix))
    condition = torch.linalg.cond(matrix)
    assert values.max() < 1.3
    assert values.min() > 0.5 or condition > 50


def test_the_histogram_counts_never_sometimes_and_always():
    text = histogram([0.0, 0.5, 1.0, 1.0], samples=2)
    assert "never right 25%, sometimes 25%, always 50%" in text
