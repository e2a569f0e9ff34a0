"""The Triton kernels and the CUDA graphs against their counterparts in torch, on a machine that has a GPU."""

from __future__ import annotations

import pytest
import torch
from unit.engine.models import CONFIGS, drain, fresh, logits_after

from goldilocks.engine import Engine, SamplingParams
from goldilocks.engine.decoder import draw, grouped_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "size", "length"),
    [(3, 4, 2, 16, 130), (2, 14, 2, 64, 70), (40, 4, 4, 24, 100), (300, 4, 2, 16, 10)],
)
def test_a_row_attends_to_its_own_columns(rows: int, heads: int, key_heads: int, size: int, length: int) -> None:
    from goldilocks.engine import kernels

    torch.manual_seed(0)
    query = torch.randn(rows, heads, 1, size, device="cuda")
    keys, values = torch.randn(2, rows + 1, key_heads, length, size, device="cuda")
    new_keys, new_values = torch.randn(2, rows, key_heads, 1, size, device="cuda")
    last = torch.randint(0, length, (rows,), device="cuda")
    kernels.write(new_keys, new_values, keys, values, last)
    row = torch.arange(rows, device="cuda")
    assert torch.equal(keys[row, :, last], new_keys[:, :, 0])
    assert torch.equal(values[row, :, last], new_values[:, :, 0])
    out = kernels.attend(query, keys, values, last.int()[:, None, None, None], size**-0.5)
    hidden = torch.arange(length, device="cuda") > last[:, None]
    mask = torch.zeros((), device="cuda").masked_fill(hidden, -torch.inf)[:, None, None]
    torch.testing.assert_close(
        out, grouped_attention(query, keys[:rows], values[:rows], mask, None), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("vocabulary", [33, 4096, 9000])
def test_the_draw_is_that_of_torch(vocabulary: int) -> None:
    from goldilocks.engine import kernels

    torch.manual_seed(0)
    logits = torch.randn(64, vocabulary, device="cuda") * 3
    logits[:20, vocabulary // 2 :] = -torch.inf
    temperature, numbers = torch.rand(64, device="cuda") + 0.3, torch.rand(64, 2, device="cuda")
    greedy = torch.arange(64, device="cuda") % 4 // 3
    ours, expected = kernels.draw(logits, temperature, greedy, numbers), draw(logits, temperature, greedy, numbers)
    assert (ours.tokens == expected.tokens).float().mean() > 0.98  # a running sum rounds differently
    same = ours.tokens == expected.tokens
    torch.testing.assert_close(ours.log_probs[same], expected.log_probs[same], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.top_log_probs, expected.top_log_probs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_give_the_log_probs_of_a_full_forward_pass(name: str) -> None:
    engine = Engine(fresh(name), slots=20, max_length=40, eos_ids=(5,), pad_id=0, device="cuda")
    prompts = [[i % 7 + 1] * (1 + i % 9) for i in range(30)]
    for i, prompt in enumerate(prompts):
        engine.submit(str(i), prompt, SamplingParams(max_tokens=5 + i % 20, top_k=20 if i % 2 else -1, seed=i))
    done = drain(engine)
    assert len(done) == 30
    for i, prompt in enumerate(prompts):
        answer = done[str(i)]
        logits = logits_after(name, prompt, answer.token_ids)
        if i % 2:
            logits = logits.masked_fill(logits < logits.topk(20).values[:, -1:], -torch.inf)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (expected - torch.tensor(answer.log_probs)).abs().max() < 1e-5


def test_sleep_frees_the_memory_and_the_answers_after_waking_are_the_same() -> None:
    engine = Engine(fresh("llama"), slots=4096, max_length=64, eos_ids=(5,), pad_id=0, device="cuda")

    def answers() -> dict[str, list[int]]:
        for i in range(20):
            engine.submit(str(i), [i, 2, 3], SamplingParams(max_tokens=20, temperature=0))
        return {name: generation.token_ids for name, generation in drain(engine).items()}

    before, awake = answers(), torch.cuda.memory_allocated()
    engine.sleep()
    cache = 2 * 2 * 4096 * 2 * 64 * 8 * 4  # keys and values, layers, rows, heads, positions, head size, bytes
    assert awake - torch.cuda.memory_allocated() >= cache
    engine.wake()
    assert answers() == before
