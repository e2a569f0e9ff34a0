"""A text is as long as a model's plain attention reaches, or refused by the key that ends it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PretrainedConfig, PreTrainedModel
from unit.engine.architectures import SUPPORTED, WINDOWED, config_of, fresh, made
from unit.engine.models import differences, drain

from goldilocks.engine import Engine, SamplingParams
from goldilocks.engine.reach import bounds, check_length, hides

WINDOW = 12


def engine(model: PreTrainedModel, max_length: int) -> Engine:
    return Engine(model, slots=2, max_length=max_length, eos_ids=(), pad_id=0, device="cpu")


def worst_difference(model: PreTrainedModel, max_length: int) -> float:
    """Of the log-probs of answers that fill ``max_length``, against the model's own forward pass."""
    plain, runs = copy.deepcopy(model), engine(model, max_length)
    prompts = [[1, 2, 3], list(range(4, 3 + max_length))]
    for number, prompt in enumerate(prompts):
        runs.submit(str(number), prompt, SamplingParams(max_tokens=max_length - len(prompt), seed=number))
    answers = [(prompts[int(name)], generation) for name, generation in drain(runs).items()]
    return differences(plain, answers).max().item()


@pytest.mark.parametrize("name", WINDOWED)
def test_a_text_that_the_window_holds_is_exact_and_a_longer_one_is_refused_by_the_key_as_the_masks_say(
    name: str,
) -> None:
    config = config_of(WINDOWED[name])
    model = made(config)
    key = "attention_chunk_size" if name == "llama4" else "sliding_window"
    assert bounds(config)[key] == WINDOW
    assert not hides(model, WINDOW)
    assert hides(model, WINDOW + 1)
    message = rf"max_length=13 is not accepted: the model's {key}=12 or less, or another engine \(verl: roll"
    with pytest.raises(ValueError, match=message):
        engine(made(config), WINDOW + 1)
    assert worst_difference(model, WINDOW) < 1e-5


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_is_supported_attends_to_all_of_a_short_text(name: str) -> None:
    assert not hides(fresh(name), 40)


def test_a_window_that_the_config_hides_is_found_in_the_masks() -> None:
    model = made(config_of(WINDOWED["mistral"], layer_types=["full_attention"] * 2))  # which Mistral does not read
    assert "sliding_window" not in bounds(model.config)
    with pytest.raises(ValueError, match=r"max_length=13 .* the reach of every layer of MistralForCausalLM, or"):
        engine(model, WINDOW + 1)
    assert worst_difference(model, WINDOW) < 1e-5


@pytest.mark.parametrize("keys", [{"use_sliding_window": False, "sliding_window": 12}, {"sliding_window": 12}])
def test_a_window_that_is_off_is_none(keys: dict[str, Any]) -> None:
    config = config_of(SUPPORTED["qwen2"], **keys)
    assert set(bounds(config)) == {"max_position_embeddings"}
    assert worst_difference(made(config), 40) < 1e-5


def test_frequencies_that_change_with_the_length_are_refused_where_they_do() -> None:
    assert worst_difference(fresh("phi3_longrope"), 40) < 1e-5
    with pytest.raises(ValueError, match=r"max_length=41 .* the model's original_max_position_embeddings=40 or less"):
        engine(fresh("phi3_longrope"), 41)


def test_attention_that_is_sharpened_with_the_length_is_refused_where_it_is() -> None:
    llama4 = WINDOWED["llama4"]
    check_length(config_of(llama4, attention_chunk_size=60, floor_scale=30), 30)
    with pytest.raises(ValueError, match=r"max_length=31 .* the model's floor_scale=30 or less"):
        check_length(config_of(llama4, attention_chunk_size=60, floor_scale=30), 31)
    check_length(config_of(llama4, attention_chunk_size=60, floor_scale=30, attn_temperature_tuning=False), 31)
    model = made(config_of(llama4, attention_chunk_size=60, floor_scale=30, no_rope_layers=[0, 1]))
    assert worst_difference(model, 30) < 1e-5


def test_lengths_that_no_model_has() -> None:
    config: PretrainedConfig = config_of(SUPPORTED["llama"])
    with pytest.raises(ValueError, match=r"max_length=1 .* 2 or more"):
        check_length(config, 1)
    with pytest.raises(
        ValueError, match=r"rollout\.max_model_len=65 .* the model's max_position_embeddings=64 or less"
    ):
        check_length(config, 65, "rollout.max_model_len")
