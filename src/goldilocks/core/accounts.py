"""Where every generated token went. The classes sum to what was generated, at every moment.

A rollout is posted once, when it arrives, and from then on only moves from one class to another.
``goldilocks.types.Account`` lists the classes.

Rollouts that stopped when the batch was full and go on with the next policy.

To its group a paused rollout is in flight: it has an index, no reward, and decides nothing. What it has written is
charged when it pauses, to the account ``paused``; when it pauses again or ends, that charge is taken back and the whole
is posted. So a token is charged once, in the step that wrote it, however often its rollout pauses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from goldilocks.types import Account, AccountName, Event, Paused, Rollout


class Accounts:
    """Rollouts and tokens by class. ``generated_*`` are counted apart from the classes, so that the sum is a check."""

    def __init__(self) -> None:
        self.generated_rollouts = 0
        self.generated_tokens = 0
        self.rollouts: dict[str, int] = {}
        self.tokens: dict[str, int] = {}

    def post(self, account: Account, tokens: int) -> None:
        """Count a rollout that has arrived."""
        self.generated_rollouts += 1
        self.generated_tokens += tokens
        self._add(account, 1, tokens)

    def withdraw(self, account: Account, tokens: int) -> None:
        """Take a ``post`` back: the rollout is about to be posted whole."""
        self.generated_rollouts -= 1
        self.generated_tokens -= tokens
        self._add(account, -1, -tokens)

    def move(self, rollouts: Collection[Rollout], origin: Account | AccountName, target: Account | AccountName) -> None:
        """Move rollouts from one class to another."""
        if rollouts:
            count, tokens = len(rollouts), sum(rollout.tokens for rollout in rollouts)
            self._add(origin, -count, -tokens)
            self._add(target, count, tokens)

    def _add(self, name: str, rollouts: int, tokens: int) -> None:
        account = str(name)  # a plain string, so that a saved state holds nothing else
        self.rollouts[account] = self.rollouts.get(account, 0) + rollouts
        self.tokens[account] = self.tokens.get(account, 0) + tokens

    def check(self) -> None:
        """Raise if a token is unaccounted for. Cheap enough to call at every step."""
        for name, generated, classes in (
            ("rollouts", self.generated_rollouts, self.rollouts),
            ("tokens", self.generated_tokens, self.tokens),
        ):
            if sum(classes.values()) != generated or min(classes.values(), default=0) < 0:
                raise AssertionError(f"accounts do not sum: {generated} {name} generated, classes {classes}")

    def by_class(self, counts: dict[str, int]) -> dict[str, int]:
        """The counts with reasons folded into their class; every class is there, whether or not it was used."""
        folded = {str(account): 0 for account in Account}
        for account, count in counts.items():
            folded[account.partition("/")[0]] += count
        return folded

    def metrics(self) -> dict[str, float]:
        """Running totals: ``accounts/<class>_tokens`` and ``_rollouts`` by class and, where there is one, by reason."""
        values: dict[str, float] = {
            "accounts/generated_rollouts": self.generated_rollouts,
            "accounts/generated_tokens": self.generated_tokens,
        }
        for unit, counts in (("rollouts", self.rollouts), ("tokens", self.tokens)):
            for account, count in {**self.by_class(counts), **counts}.items():
                values[f"accounts/{account}_{unit}"] = count
        return values

    def state_dict(self) -> dict[str, Any]:
        return {
            "generated_rollouts": self.generated_rollouts,
            "generated_tokens": self.generated_tokens,
            "rollouts": dict(self.rollouts),
            "tokens": dict(self.tokens),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generated_rollouts = state["generated_rollouts"]
        self.generated_tokens = state["generated_tokens"]
        self.rollouts = dict(state["rollouts"])
        self.tokens = dict(state["tokens"])


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
