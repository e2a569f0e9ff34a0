"""New weights for a live model; merged ones give the answers of the adapted model, which stays as it was."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from unit.engine.models import VOCABULARY, fresh

from goldilocks.engine.weights import check_adapters, load, merged


def test_a_name_the_model_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'model\.nothing' is not in LlamaForCausalLM"):
        load(fresh("llama"), {"model.nothing": torch.zeros(1)}.items())


def test_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \(3,\); the model's is \(32,\)"):
        load(fresh("llama"), {"model.norm.weight": torch.zeros(3)}.items())


def test_another_type_is_converted() -> None:
    model = fresh("llama")
    load(model, {"model.norm.weight": torch.full((32,), 0.5, dtype=torch.bfloat16)}.items())
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.norm.weight.tolist() == [0.5] * 32


@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight"]])
def test_tied_weights_may_come_under_either_name(names: list[str]) -> None:
    model = fresh("qwen2")
    new = torch.randn_like(model.lm_head.weight)
    load(model, dict.fromkeys(names, new).items())
    assert torch.equal(model.lm_head.weight, new)
    assert torch.equal(model.model.embed_tokens.weight, new)


def test_tied_weights_that_differ_are_an_error() -> None:
    model = fresh("qwen2")
    new = torch.randn_like(model.lm_head.weight)
    load(model, {"lm_head.weight": new, "model.embed_tokens.weight": new.clone()}.items())
    assert torch.equal(model.lm_head.weight, new)
    with pytest.raises(ValueError, match="are tied"):
        load(model, {"lm_head.weight": new, "model.embed_tokens.weight": new + 1}.items())


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_an_error_that_says_why(name: str) -> None:
    model = fresh("qwen2")
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    weights[name].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=rf"'{name}' and \d+ more are not finite: the training has diverged"):
        load(model, weights.items())


IDS = torch.arange(24).reshape(2, 12) % VOCABULARY
LORA = {
    "one layer": {"target_modules": ["q_proj"]},
    "all layers": {"target_modules": "all-linear"},
    "scaled by the root of the rank": {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 5},
    "magnitude and direction": {"target_modules": "all-linear", "use_dora": True},
    "a layer trained whole": {"target_modules": ["v_proj"], "modules_to_save": ["norm"]},
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
}


def adapted(name: str, **chosen: Any) -> Any:
    """Return a model with an adapter that has been trained: none of its parameters is as it began."""
    model = peft.get_peft_model(fresh(name), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **chosen)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in filter(lambda one: one.requires_grad, model.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def log_probs(model: Any) -> torch.Tensor:
    return model(IDS).logits.float().log_softmax(-1)


@pytest.mark.parametrize("chosen", LORA.values(), ids=LORA)
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_merged_weights_have_the_log_probs_of_the_adapted_model(name: str, chosen: dict[str, Any]) -> None:
    model, plain = adapted(name, **chosen), fresh(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trained = log_probs(model)
    assert (trained - log_probs(plain)).abs().max() > 1e-2, "the adapter says something"
    load(plain, merged(model))
    assert (trained - log_probs(plain)).abs().max() < 1e-5
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_every_weight_comes_once_under_the_base_models_name() -> None:
    model = adapted("llama", target_modules="all-linear", modules_to_save=["norm"])
    names = [name for name, _ in merged(model)]
    assert sorted(names) == sorted(fresh("llama").state_dict())


def test_an_adapter_in_fp32_on_a_base_in_bf16_is_merged_in_fp32() -> None:
    base = fresh("llama").to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    torch.nn.init.constant_(layer.lora_B["default"].weight, 0.01)
    found = dict(merged(model))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, layer.base_layer.weight.float() + layer.get_delta_weight("default").float())


def test_an_adapter_without_weights_to_merge_is_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(fresh("llama"), config)
    with pytest.raises(ValueError, match=r"engine_slots=8 is not accepted: none with PEFT's PROMPT_TUNING"):
        check_adapters(model, "engine_slots", 8)


def test_an_adapter_of_a_quantized_model_is_refused() -> None:
    model = adapted("llama", target_modules=["q_proj"])
    check_adapters(model, "engine_slots", 8)
    model.config.quantization_config = {"load_in_4bit": True}
    with pytest.raises(ValueError, match=r"engine_slots=8 is not accepted: none with an adapter of a quantized model"):
        check_adapters(model, "engine_slots", 8)


@pytest.mark.parametrize(
    "chosen",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["lm_head"], "ensure_weight_tying": True},  # tied by views, which are not copied
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # PEFT warns of each
def test_an_adapter_that_unties_embeddings_is_refused(chosen: dict[str, Any]) -> None:
    model = adapted("qwen2", **chosen)
    with pytest.raises(ValueError, match=r"engine_slots=8 is not accepted: none with .* \(tie_word_embeddings\): .*"):
        check_adapters(model, "engine_slots", 8)
    check_adapters(adapted("llama", **{**chosen, "ensure_weight_tying": False}), "engine_slots", 8)  # is not tied


@pytest.mark.parametrize(
    "chosen",
    [{"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, {"trainable_token_indices": [1, 2]}],
    ids=str,
)
def test_an_adapter_of_both_sides_of_tied_embeddings_is_merged(chosen: dict[str, Any]) -> None:
    model, plain = adapted("qwen2", target_modules=["q_proj"], **chosen), fresh("qwen2")
    check_adapters(model, "engine_slots", 8)
    load(plain, merged(model))
    assert (log_probs(model) - log_probs(plain)).abs().max() < 1e-5
