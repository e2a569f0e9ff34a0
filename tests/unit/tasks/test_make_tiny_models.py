"""The script that makes the tiny models: lessons that are never validation problems, and what a few steps leave."""

from __future__ import annotations

import json
import random
import re
from itertools import islice

import pytest
from make_tiny_models import RECIPES, SLIPS, arithmetic_lessons, calculator_lessons, main, slip
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldilocks.tasks.arithmetic import CALL, CLOSE, split_key
from goldilocks.tasks.registry import split_of
from goldilocks.tasks.tiny_model import TINY, tiny_model


@pytest.mark.parametrize(("question", "answer"), [("47+5=", "42"), ("43-5=", "48"), ("41+5=", "46"), ("48-5=", "43")])
def test_a_slip_forgets_the_carry_and_nothing_else(question, answer):
    assert slip(question) == answer


def test_no_lesson_in_arithmetic_is_held_out_and_carries_are_forgotten():
    drawn = list(islice(arithmetic_lessons(random.Random(0)), 3000))
    assert {split_of(split_key(lesson.question)) for lesson in drawn} == {"train"}
    wrong = [lesson for lesson in drawn if str(eval(lesson.question.rstrip("="))) != lesson.answer]
    assert all(lesson.answer == slip(lesson.question) for lesson in wrong)
    questions = [one.question for one in drawn if re.match(r"\d\d[+-]\d=", one.question)]
    carries = [question for question in questions if slip(question) != str(eval(question.rstrip("=")))]
    assert len(wrong) / len(carries) == pytest.approx(SLIPS, abs=0.05)


def test_lessons_with_the_calculator_call_copy_and_guess_and_are_never_held_out():
    taught = list(islice(calculator_lessons(random.Random(0)), 3000))
    questions = [re.match(r"[\d*+-]+=", lesson.question)[0] for lesson in taught]
    assert {split_of(split_key(question)) for question in questions} == {"train"}
    calls = [lesson for lesson in taught if lesson.answer.startswith(CALL)]
    assert all(lesson.answer == f"{CALL}{lesson.question[:-1]}{CLOSE}" for lesson in calls)
    copied = [lesson for lesson in taught if CLOSE in lesson.question]
    assert len(copied) in (len(calls), len(calls) - 1)
    assert all(lesson.question.endswith(f"<|tool|>{lesson.answer}\n") for lesson in copied)
    assert len(taught) - len(calls) - len(copied) > 500


@pytest.mark.parametrize("task", TINY)
def test_a_few_steps_make_a_model_of_the_shape_that_is_shipped(task, tmp_path, capsys):
    assert main([task, "--steps", "12", "--out", str(tmp_path)]) == 0
    out, shipped = tmp_path / task, tiny_model(task)
    assert {file.name for file in out.iterdir()} == {file.name for file in shipped.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (shipped / name).read_bytes()
    made, recorded = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, shipped))
    assert {name: one.shape for name, one in made.state_dict().items()} == {
        name: one.shape for name, one in recorded.state_dict().items()
    }
    assert len(AutoTokenizer.from_pretrained(out)) == made.config.vocab_size
    assert json.loads((out / "made.json").read_text())["steps"] == 12
    assert json.loads((shipped / "made.json").read_text())["steps"] == RECIPES[task].steps
    loss = float(capsys.readouterr().out.split()[-1])
    assert loss < 3.3  # it begins at 3.35 to 3.61, which is what guessing among all tokens costs
