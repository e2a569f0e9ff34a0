"""verl warns at every rollout of a model type that it has no builder for: its logger passes such a line once."""

from __future__ import annotations

import logging


class Once(logging.Filter):
    """Passes each message once in a process."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        message = record.getMessage()
        new = message not in self._seen
        self._seen.add(message)
        return new


logging.getLogger("verl.utils.tokenizer.continuous_token_wiring").addFilter(Once())
