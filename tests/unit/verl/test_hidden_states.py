"""Hidden states of a tiny model as features of prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from transformers import AutoModel, AutoTokenizer

from goldilocks.tasks import tiny_model
from goldilocks.verl.source import _name, compute


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model.make(path, steps=1)
    return path


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_row_is_what_the_model_alone_gives_whatever_it_is_batched_with(model):
    prompts = [chat("1 + 2"), chat("123 * 456 + 7"), chat("9")]
    states = compute(str(model), prompts, "cpu", longest=64)
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model)
    for row, messages in zip(states, prompts, strict=True):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            layer = network(tokens).last_hidden_state[0]
        assert_allclose(row, torch.cat([layer.mean(0), layer[-1]]).numpy(), atol=1e-4)


def test_other_data_or_another_model_have_another_place_in_the_cache(model, tmp_path):
    keys = np.arange(4, dtype=np.uint64)
    names = {
        _name(str(model), keys),
        _name(str(model), keys[::-1]),
        _name(str(tmp_path), keys),
        _name("org/model", keys),
    }
    assert len(names) == 4
    before = _name(str(model), keys)
    assert _name(str(model), keys) == before
    (model / "model.safetensors").touch()
    assert _name(str(model), keys) != before
