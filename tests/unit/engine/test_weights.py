from __future__ import annotations

from typing import Any

import pytest
import torch
from unit.engine.models import fresh

from goldilocks.engine.weights import load, load_all

BOTH = pytest.mark.parametrize("way", [lambda model, named: load(model, named.items()), load_all], ids=["one", "all"])


@BOTH
def test_a_name_the_model_lacks_is_an_error(way: Any) -> None:
    with pytest.raises(ValueError, match=r"'model\.nothing' is not in LlamaForCausalLM"):
        way(fresh("llama"), {"model.nothing": torch.zeros(1)})


@BOTH
def test_another_shape_is_an_error(way: Any) -> None:
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \(3,\); the model's is \(32,\)"):
        way(fresh("llama"), {"model.norm.weight": torch.zeros(3)})


@BOTH
def test_another_type_is_converted(way: Any) -> None:
    model = fresh("llama")
    way(model, {"model.norm.weight": torch.full((32,), 0.5, dtype=torch.bfloat16)})
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.norm.weight.tolist() == [0.5] * 32


@BOTH
@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight"]])
def test_tied_weights_may_come_under_either_name(names: list[str], way: Any) -> None:
    model = fresh("qwen2")
    new = torch.randn_like(model.lm_head.weight)
    way(model, dict.fromkeys(names, new))
    assert torch.equal(model.lm_head.weight, new)
    assert torch.equal(model.model.embed_tokens.weight, new)


@BOTH
def test_tied_weights_that_differ_are_an_error(way: Any) -> None:
    model = fresh("qwen2")
    new = torch.randn_like(model.lm_head.weight)
    way(model, {"lm_head.weight": new, "model.embed_tokens.weight": new.clone()})
    assert torch.equal(model.lm_head.weight, new)
    with pytest.raises(ValueError, match="are tied"):
        way(model, {"lm_head.weight": new, "model.embed_tokens.weight": new + 1})


@BOTH
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_an_error_that_says_why(name: str, way: Any) -> None:
    model = fresh("qwen2")
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    weights[name].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=rf"'{name}' and \d+ more are not finite: the training has diverged"):
        way(model, weights)


def test_all_weights_at_once_are_those_of_one_at_a_time() -> None:
    new = {name: torch.randn_like(value) for name, value in fresh("qwen2").state_dict().items()}
    new["lm_head.weight"] = new["model.embed_tokens.weight"]
    one, other = fresh("qwen2"), fresh("qwen2")
    load(one, new.items())
    load_all(other, new)
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in other.state_dict().items())
