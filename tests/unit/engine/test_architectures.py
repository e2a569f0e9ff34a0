"""Every architecture that the engine is said to run gives the log-probs of transformers' own forward pass.

On a GPU: ``python -m pytest tests/unit/engine/test_architectures.py -k cuda -s`` prints the largest differences.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from unit.engine.architectures import EXPERTS, SUPPORTED, fresh
from unit.engine.models import differences, drain, log_probs

from goldilocks.engine import Engine, Generation, SamplingParams

LENGTH = 13
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = [[number % 7 + 1, *range(20, 20 + 3 * (number % 4))] for number in range(4)]


def answers(model: PreTrainedModel, device: str) -> list[tuple[list[int], Generation]]:
    """Prompts with their answers, each of which fills all positions: rows join and leave the batch at other times."""
    engine = Engine(model, slots=3, max_length=LENGTH, eos_ids=(), pad_id=0, device=device)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(str(number), prompt, SamplingParams(max_tokens=LENGTH - len(prompt), seed=number))
    return [(PROMPTS[int(name)], generation) for name, generation in drain(engine).items()]


def rounded(name: str) -> PreTrainedModel:
    """The model as it is loaded in bfloat16: its frequencies and other buffers stay as they are."""
    model = fresh(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.parametrize("name", SUPPORTED)
def test_log_probs_are_those_of_transformers(name: str) -> None:
    found = answers(fresh(name), "cpu")
    assert len(found) == len(PROMPTS)
    assert differences(fresh(name), found).max() < 1e-5


ENCODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, ENCODER) for name in ("Bart", "MBart", "Pegasus", "BigBirdPegasus", "PLBart", "Marian", "Blenderbot")),
        *((name, BERT) for name in ("Roberta", "XLMRoberta")),
    ],
)
def test_an_architecture_that_counts_positions_by_its_own_cache_is_refused(name: str, keys: dict[str, int]) -> None:
    torch.manual_seed(0)
    common = {"vocab_size": 64, "max_position_embeddings": 64, "is_decoder": True, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**common, **keys)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    refused = rf"model={name}ForCausalLM is not accepted, .* other log-probs .* in the mean; at most 0\.001 in float32"
    with pytest.raises(ValueError, match=refused):
        Engine(model, slots=2, max_length=20, eos_ids=(), pad_id=0, device="cpu")


@on_cuda
@pytest.mark.parametrize("name", sorted(set(SUPPORTED) - EXPERTS))  # products by expert are not captured in float32
def test_cuda_log_probs_are_those_of_transformers_in_float32(name: str) -> None:
    found = answers(fresh(name), "cuda")
    worst = differences(fresh(name).cuda(), found).max().item()
    print(f"\ntransformers {transformers.__version__} {name}: float32, largest difference {worst:.1e}")
    assert len(found) == len(PROMPTS)
    assert worst < 1e-4


@on_cuda
@pytest.mark.parametrize("name", SUPPORTED)
def test_cuda_log_probs_in_bfloat16_err_no_more_than_transformers_do(name: str) -> None:
    found = answers(rounded(name), "cuda")
    exact, plain = fresh(name).cuda(), rounded(name).cuda()
    ours = differences(exact, found).mean().item()
    theirs = torch.cat([log_probs(exact, p, g.token_ids) - log_probs(plain, p, g.token_ids) for p, g in found])
    bound = 2 * theirs.abs().mean().item() + 0.005
    print(f"\ntransformers {transformers.__version__} {name}: bfloat16, mean error {ours:.4f}, bound {bound:.4f}")
    assert len(found) == len(PROMPTS)
    assert ours < bound
