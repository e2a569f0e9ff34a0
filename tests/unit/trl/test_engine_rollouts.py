"""The engine in TRL: texts as long as the model's window, and conversations that go on after a tool.

A longer text is refused by the key that ends it. Each turn of a conversation has a seed and a limit of its own. Merged
weights give the answers of the adapted model, which stays as it was.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import trl_world as world
from unit.engine.architectures import WINDOWED, config_of, made
from unit.engine.models import VOCABULARY, fresh

from goldilocks.engine import Engine
from goldilocks.engine.engine import overwrite
from goldilocks.trl.engine_rollouts import EngineRollouts, Turns, check_adapters, merged


def rollouts(out: Path, completion: int) -> EngineRollouts:
    args = world.arguments(out, max_completion_length=completion)
    return EngineRollouts(args, slots=2, eos_ids=[5], pad_id=0, device=torch.device("cpu"))


def test_a_text_that_the_window_holds_is_generated_and_a_longer_one_is_refused_by_the_key(tmp_path: Path) -> None:
    """Though the cache has room for more."""
    asking, model = rollouts(tmp_path, completion=8), made(config_of(WINDOWED["mistral"]))
    assert all(1 <= len(one.token_ids) <= 8 for one in asking.generate(model, 0, [[1, 2, 3, 4], [7]], [0, 1], [8, 8]))
    message = "max_completion_length with the longest prompt=13 .* the model's sliding_window=12 or less"
    with pytest.raises(ValueError, match=message):
        asking.generate(model, 0, [[1, 2, 3, 4, 5], [7]], [0, 1], [8, 8])


def test_completions_longer_than_the_window_are_refused_before_the_start(tmp_path: Path) -> None:
    model = made(config_of(WINDOWED["mistral"]))
    with pytest.raises(ValueError, match=r"max_completion_length \+ 1=13 .* the model's sliding_window=12 or less"):
        world.trainer(tmp_path, model=model, sections={"engine_slots": 2}, max_completion_length=12)


def test_after_an_interruption_the_same_answers_are_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = made(config_of(WINDOWED["mistral"])), 0, [[1, 2], [7], [3]], [0, 1, 2], [8, 8, 8]
    theirs = rollouts(tmp_path, completion=8).generate(*asked)
    ours, step, steps = rollouts(tmp_path, completion=8), Engine.step, iter([False, False, True])

    def interrupted(engine: Engine) -> Any:
        if next(steps, False):
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.generate(*asked)
    assert [one.token_ids for one in ours.generate(*asked)] == [one.token_ids for one in theirs]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True is not .*: False"),
        ({"rollout_func": print}, "engine_slots=2 is not accepted: none with a rollout_func"),
    ],
)
def test_another_way_to_generate_is_refused(tmp_path: Path, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world.trainer(tmp_path, sections={"engine_slots": 2}, **chosen)


PROMPTS = [[1], [1], [1], [2, 3]]
SEEDS = [10, 11, 12, 13]
TOOL = [8, 8]


def test_the_first_turn_has_the_rollouts_own_seeds() -> None:
    seeds, limits = Turns(PROMPTS, SEEDS, longest=6).next(PROMPTS)
    assert seeds == SEEDS
    assert limits == [6, 6, 6, 6]


def test_a_later_turn_is_known_by_what_its_conversation_has_written() -> None:
    """The first and the third have the same text; the second calls no tool."""
    turns = Turns(PROMPTS, SEEDS, longest=6)
    turns.next(PROMPTS)
    turns.wrote(PROMPTS, [[5], [6], [5], [7, 7]])
    asked = [[1, 5, *TOOL], [1, 5, *TOOL], [2, 3, 7, 7, *TOOL]]
    seeds, limits = turns.next(asked)
    assert len({*seeds, *SEEDS}) == len(seeds) + len(SEEDS)
    assert limits == [3, 3, 2]
    turns.wrote(asked, [[4], [4], [9]])
    _, limits = turns.next([[2, 3, 7, 7, *TOOL, 9, *TOOL]])
    assert limits == [1]  # TRL cuts what does not fit
    again = Turns([[2, 3]], [13], longest=6)
    again.next([[2, 3]])
    again.wrote([[2, 3]], [[7, 7]])
    assert again.next([[2, 3, 7, 7, *TOOL]])[0] == [seeds[2]]  # whatever is generated beside it


@pytest.mark.parametrize("training", [True, False])
def test_a_group_on_two_processes_draws_no_noise_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    trainer = world.trainer(tmp_path, sections={"engine_slots": 2})
    trainer.model.train(training)
    seeds = []
    for rank in range(2):  # four rollouts of one prompt, two on each process
        monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(process_index=rank))
        seeds += trainer._plain_seeds([[1, 2]] * 2)
    assert len(set(seeds)) == 4


# -- adapters ----------------------------------------------------------------------------------------------------------


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
    overwrite(plain, merged(model))
    assert (trained - log_probs(plain)).abs().max() < 1e-5
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_every_weight_comes_once_under_the_base_models_name() -> None:
    model = adapted("llama", target_modules="all-linear", modules_to_save=["norm"])
    assert sorted(name for name, _ in merged(model)) == sorted(fresh("llama").state_dict())


def test_an_adapter_in_fp32_on_a_base_in_bf16_is_merged_in_fp32() -> None:
    base = fresh("llama").to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    torch.nn.init.constant_(layer.lora_B["default"].weight, 0.01)
    found = dict(merged(model))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, layer.base_layer.weight.float() + layer.get_delta_weight("default").float())


def test_an_adapter_without_weights_to_merge_is_refused() -> None:
    model = peft.get_peft_model(fresh("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
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
    overwrite(plain, merged(model))
    assert (log_probs(model) - log_probs(plain)).abs().max() < 1e-5
