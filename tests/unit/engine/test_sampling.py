from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from goldilocks.engine.decoder import BLOCK, cut, draw, uniforms


def noise(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(uniforms(np.full(rows, seed, dtype=np.uint64), np.arange(rows)))


@pytest.mark.parametrize("vocabulary", [7, 3 * BLOCK + 5])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    rows = 2_000
    logits = torch.full((vocabulary,), -torch.inf)
    likely = torch.linspace(0, vocabulary - 1, 7).long()  # spread over every block
    logits[likely] = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, 1.5, 0.3])
    expected = (logits / 0.7).softmax(-1)[likely]
    chunks = [
        draw(logits.expand(1000, -1), torch.full((1000,), 0.7), torch.zeros(1000, dtype=torch.long), part).tokens
        for part in noise(rows).split(1000)
    ]
    counts = torch.bincount(torch.cat(chunks), minlength=vocabulary)
    assert counts.sum() == counts[likely].sum() == rows
    error = (counts[likely] / rows - expected) / (expected * (1 - expected) / rows).sqrt()
    assert error.abs().max() < 4


@settings(max_examples=50)
@given(seed=st.integers(0, 2**64 - 1), scale=st.floats(0.1, 30), kept=st.integers(1, 50))
def test_a_token_that_was_cut_is_never_drawn_and_log_probs_are_exact(seed: int, scale: float, kept: int) -> None:
    rows = 16
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed % 2**63)) * scale
    ones = torch.ones(rows)
    logits = cut(logits, ones, torch.full((rows,), kept), ones)
    drawn = draw(logits, ones, torch.zeros(rows, dtype=torch.long), noise(rows, seed))
    expected = logits.log_softmax(-1)
    chosen = expected.gather(1, drawn.tokens[:, None])[:, 0]
    assert torch.isfinite(chosen).all()
    torch.testing.assert_close(drawn.log_probs, chosen, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drawn.top_log_probs, expected.max(-1).values, atol=1e-5, rtol=1e-5)


def test_greedy_rows_take_the_most_likely_token() -> None:
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits, torch.ones(10), torch.ones(10, dtype=torch.long), noise(10))
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    assert torch.equal(drawn.log_probs, drawn.top_log_probs)


@pytest.mark.parametrize(("k", "p"), [(5, 1.0), (40, 0.5), (7, 0.9), (40, 0.01)])
def test_the_cut_is_that_of_transformers(k: int, p: float) -> None:
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)) * 2
    expected = TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, logits / 0.7))
    ours = cut(logits, torch.full((8,), 0.7), torch.full((8,), k), torch.full((8,), p))
    assert torch.equal(torch.isinf(ours), torch.isinf(expected))
    assert torch.equal(ours[~torch.isinf(ours)], logits[~torch.isinf(ours)])


def test_tokens_tied_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert torch.isfinite(cut(logits, torch.ones(1), torch.tensor([2]), torch.ones(1)))[0].tolist() == [
        True, True, True, False
    ]  # fmt: skip


def test_noise_depends_on_seed_and_position_alone() -> None:
    whole = uniforms(np.arange(50, dtype=np.uint64)[:, None], np.arange(40)[None, :])
    assert whole.shape == (50, 40, 2)
    assert whole.dtype == np.float32
    assert np.array_equal(whole[7, 30:33], uniforms(np.uint64([7]), np.arange(30, 33)))
    assert whole.min() >= 0
    assert whole.max() < 1
    assert len(np.unique(whole)) > 3990
    assert abs(whole.mean() - 0.5) < 0.02
    for axis in (0, 1):  # neighbouring seeds and positions are unrelated
        pairs = np.moveaxis(whole[..., 0], axis, 0)
        assert abs(np.corrcoef(pairs[:-1].ravel(), pairs[1:].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(whole[..., 0].ravel(), whole[..., 1].ravel())[0, 1]) < 0.1
