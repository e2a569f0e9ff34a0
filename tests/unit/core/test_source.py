from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

from goldilocks.core.source import PromptOrder, TablePrompts


class Questions(TablePrompts):
    def messages(self) -> list[str]:
        return ["?"] * 2


def test_a_pass_that_leaves_prompts_out_is_followed_by_the_next_one_and_one_without_a_prompt_is_refused() -> None:
    """TRL's sampler drops what makes no whole batch of an epoch."""
    pool = PromptOrder(5, seed=0, repeat=True, order=lambda epoch: np.array([4, 1, 2, 0]) + epoch % 2)
    assert pool.next(6).tolist() == [4, 1, 2, 0, 5, 2]
    assert pool.epoch == 1
    with pytest.raises(ValueError, match="order='no prompt in epoch 0' is not accepted: one or more"):
        PromptOrder(5, seed=0, repeat=True, order=lambda epoch: np.arange(0)).next(1)


@pytest.mark.parametrize("now", ["abcabc", "cbacba", "aabbcc", "bca", "xcacabb"])
def test_without_repeats_each_of_several_equal_prompts_is_spent_once_whatever_the_order_of_the_data(now: str) -> None:
    before, after = (
        PromptOrder(len(names), seed=0, repeat=False, keys=np.array([ord(name) for name in names], dtype=np.uint64))
        for names in ("abcabc", now)
    )
    before.claim([0, 2, 3])  # both a, and one c
    after.load_state_dict(before.state_dict())
    free = Counter(now[index] for index in after.free())
    assert free == Counter(now) - Counter("aac")
    assert Counter(now[index] for index in after.next(9)) == free


def test_a_column_is_of_the_data_or_of_its_extra_info_words_as_well_as_numbers() -> None:
    source = Questions(2)
    source.table = Dataset.from_dict({"level": ["easy", "hard"], "extra_info": [{"skill": "add"}, {"skill": None}]})
    assert source.column("level", "key") == ["easy", "hard"]
    assert source.column("skill", "key") == ["add", None]
    with pytest.raises(ValueError, match=r"key='topic' is not accepted: .* data: extra_info, level, skill"):
        source.column("topic", "key")
