"""Log-probs of a window of logits, with what either release of verl says of the temperature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl_world import nested

from goldilocks.verl.patches.speed import WINDOW, read_a_window

LENGTHS, FIRST, WORDS = (5, 3), 1, 7  # of the rows; the first column whose logits there are; of the vocabulary


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("says_if_it_is_one", [True, False])
def test_the_window_has_its_tokens_log_probs_at_the_temperature(temperature: float, says_if_it_is_one: bool) -> None:
    columns = max(LENGTHS) - 1 - FIRST
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(LENGTHS), columns, WORDS, generator=generator)
    labels = torch.randint(WORDS, (len(LENGTHS), columns), generator=generator)
    batch = TensorDict({"input_ids": nested(torch.zeros(length, dtype=torch.long) for length in LENGTHS)}, [2])
    about: dict[str, Any] = {WINDOW: FIRST, "labels": labels, "temperature": torch.full((2,), temperature)}
    about |= {"temperature_is_one": temperature == 1.0} if says_if_it_is_one else {}

    found = read_a_window(lambda *_: None)(None, SimpleNamespace(logits=logits), about, batch, None)

    expected = (logits / temperature).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    for row, length, window in zip(found["log_probs"].unbind(), LENGTHS, expected, strict=True):
        assert row.shape == (length,)
        inside = range(FIRST, length - 1)
        assert row.tolist() == pytest.approx(
            [0.0 if at not in inside else window[at - FIRST].item() for at in range(length)], abs=1e-6
        )
