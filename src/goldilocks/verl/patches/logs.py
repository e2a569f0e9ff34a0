"""What verl logs once per rollout is logged once per process."""

from __future__ import annotations

import logging

from verl.utils.tokenizer import continuous_token_wiring


class Once(logging.Filter):
    """Lets each message through the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if message in self._said:
            return False
        self._said.add(message)
        return True


# verl builds a tokenizer for every rollout, and each says when its model family has no builder of its own.
continuous_token_wiring.logger.addFilter(Once())
