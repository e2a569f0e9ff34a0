"""Python's collector leaves alone what a process has made by the time its work begins.

verl, Ray and transformers are some hundred thousand objects. Looking through them for garbage takes 0.1 s, and the
objects that come and go with the rows of a few steps are enough to have Python look.
"""

from __future__ import annotations

import gc

MADE_BETWEEN_LOOKS = 10_000  # objects; Python's 700 are fewer than those of one batch of rows


def work_begins() -> None:
    """Mark all that is there as lasting, and look for garbage less often."""
    gc.collect()  # garbage must not last
    gc.freeze()
    gc.set_threshold(MADE_BETWEEN_LOOKS)
