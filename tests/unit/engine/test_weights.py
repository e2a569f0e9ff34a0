from __future__ import annotations

import pytest
import torch
from unit.engine.models import fresh

from goldilocks.engine.weights import load


def test_a_name_the_model_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'model\.nothing' is not in LlamaForCausalLM"):
        load(fresh("llama"), [("model.nothing", torch.zeros(1))])


def test_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \(3,\); the model's is \(32,\)"):
        load(fresh("llama"), [("model.norm.weight", torch.zeros(3))])


def test_another_type_is_converted() -> None:
    model = fresh("llama")
    load(model, [("model.norm.weight", torch.full((32,), 0.5, dtype=torch.bfloat16))])
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.norm.weight.tolist() == [0.5] * 32


@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight"]])
def test_tied_weights_may_come_under_either_name(names: list[str]) -> None:
    model = fresh("qwen2")
    new = torch.randn_like(model.lm_head.weight)
    load(model, [(name, new) for name in names])
    assert torch.equal(model.lm_head.weight, new)
    assert torch.equal(model.model.embed_tokens.weight, new)


def test_tied_weights_that_differ_are_an_error() -> None:
    model = fresh("qwen2")
    new = torch.randn_like(model.lm_head.weight)
    load(model, [("lm_head.weight", new), ("model.embed_tokens.weight", new)])
    with pytest.raises(ValueError, match="are tied"):
        load(model, [("lm_head.weight", new), ("model.embed_tokens.weight", new + 1)])


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_an_error_that_says_why(name: str) -> None:
    model = fresh("qwen2")
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    weights[name].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=rf"'{name}' and \d+ more are not finite: the training has diverged"):
        load(model, weights.items())
