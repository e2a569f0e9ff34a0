"""Rollouts that stopped when the batch was full and go on with the next policy.

To its group a paused rollout is in flight: it has an index, no reward, and decides nothing. What it has written is
charged when it pauses, to the account ``paused``; when it pauses again or ends, that charge is taken back and the whole
is posted. So a token is charged once, in the step that wrote it, however often its rollout pauses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from goldilocks.core.accounts import Accounts
from goldilocks.types import Account, Event, Paused

Name = tuple[str, int]  # of a rollout: its group and its index


class PausedRollouts:
    """The tokens that each paused rollout has written."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.tokens: dict[Name, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def begin(self, event: Paused) -> None:
        """Charge what a rollout has written so far."""
        self.tokens[event.uid, event.index] = event.tokens
        self._accounts.post(Account.PAUSED, event.tokens)

    def end(self, event: Event) -> int:
        """Take the charge of a rollout back; return how many tokens it was, 0 for one that was not paused."""
        tokens = self.tokens.pop((event.uid, event.index), None)
        if tokens is not None:
            self._accounts.withdraw(Account.PAUSED, tokens)
        return tokens or 0

    def retain(self, names: Collection[Name]) -> None:
        """Only these go on. What the others had written is lost, and stays charged."""
        for name in self.tokens.keys() - set(names):
            tokens = self.tokens.pop(name)
            self._accounts.withdraw(Account.PAUSED, tokens)
            self._accounts.post(Account.CANCELLED, tokens)

    def state_dict(self) -> list[Any]:
        return [[uid, index, tokens] for (uid, index), tokens in self.tokens.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        self.tokens = {(uid, index): tokens for uid, index, tokens in state}
