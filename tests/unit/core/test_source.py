from __future__ import annotations

import numpy as np

from goldilocks.core.source import PromptOrder


def test_a_pass_that_leaves_prompts_out_is_followed_by_the_next_one() -> None:
    """TRL's sampler drops what makes no whole batch of an epoch."""
    pool = PromptOrder(5, seed=0, repeat=True, order=lambda epoch: np.array([4, 1, 2, 0]) + epoch % 2)
    assert pool.next(6).tolist() == [4, 1, 2, 0, 5, 2]
    assert pool.epoch == 1
