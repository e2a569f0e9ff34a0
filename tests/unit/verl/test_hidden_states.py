"""Hidden states of a tiny model as features of prompts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from omegaconf import OmegaConf
from transformers import AutoModel, AutoTokenizer

from goldilocks.tasks import tiny_model
from goldilocks.verl import source
from goldilocks.verl.source import DatasetSource, _name, compute


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model.make(path, steps=1)
    return path


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_row_is_what_the_model_alone_gives_whatever_it_is_batched_with(model):
    prompts = [chat("1 + 2"), chat("123 * 456 + 7"), chat("9")]
    states = compute(str(model), prompts, "cpu", 64, "float32")
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model)
    for row, messages in zip(states, prompts, strict=True):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            layer = network(tokens).last_hidden_state[0]
        assert_allclose(row, torch.cat([layer.mean(0), layer[-1]]).numpy(), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_runs_in_the_precision_of_the_rollouts(model, tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(source, "cache_folder", lambda: tmp_path)
    run_here = SimpleNamespace(remote=lambda **_: lambda task: SimpleNamespace(remote=task), get=lambda found: found)
    monkeypatch.setattr(source, "ray", run_here)
    config = {
        "actor_rollout_ref": {"model": {"path": str(model)}, "rollout": {"dtype": dtype}},
        "trainer": {"device": "cpu"},
        "data": {"max_prompt_length": 64},
    }
    prompts = DatasetSource([{"raw_prompt": chat("1 + 2")}])
    (state,) = torch.from_numpy(source.hidden_states(OmegaConf.create(config), prompts))
    last = state[len(state) // 2 :]
    assert torch.equal(last, last.bfloat16().float()) == (dtype == "bfloat16")


def test_other_data_or_another_model_have_another_place_in_the_cache(model, tmp_path):
    keys = np.arange(4, dtype=np.uint64)
    names = {
        _name(str(model), "float32", keys),
        _name(str(model), "float32", keys[::-1]),
        _name(str(tmp_path), "float32", keys),
        _name("org/model", "float32", keys),
        _name(str(model), "bfloat16", keys),
    }
    assert len(names) == 5
    before = _name(str(model), "float32", keys)
    assert _name(str(model), "float32", keys) == before
    (model / "model.safetensors").touch()
    assert _name(str(model), "float32", keys) != before
