"""Where every generated token went. The classes sum to what was generated, at every moment.

A rollout is posted once, when it arrives, and from then on only moves from one class to another.
``goldilocks.types.Account`` lists the classes.

Tokens that tools wrote into rollouts were not generated: they are in no class and have a total of their own.

A rollout that stopped when the batch was full goes on with the next policy. Its group counts it as in flight. Its
tokens are charged to the account ``paused`` when it pauses. When it pauses again or ends, that charge is taken back and
all its tokens are posted. So a token is charged once, in the step that wrote it, however often its rollout pauses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from goldilocks.sheet import Sheet
from goldilocks.types import Account, AccountName, Event, Paused, Rollout

RolloutName = tuple[str, int]  # its group and its index


class Accounts:
    """Rollouts and tokens by class. ``generated_*`` are counted apart from the classes, so that the sum is a check."""

    def __init__(self) -> None:
        self.generated_rollouts = 0
        self.generated_tokens = 0
        self.tool_tokens = 0  # of rollouts that arrived
        self.rollouts: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.rewards: dict[str, float] = {}  # what reward functions have cost, by what was counted

    def charge(self, rewards: Mapping[str, float]) -> None:
        """Add what reward functions have cost: calls, seconds, and so on."""
        for name, cost in rewards.items():
            self.rewards[name] = self.rewards.get(name, 0) + cost

    def post(self, account: Account, tokens: int, rollouts: int = 1) -> None:
        """Count a rollout that has arrived; minus one rollout, of minus its tokens, undoes that."""
        self.generated_rollouts += rollouts
        self.generated_tokens += tokens
        self._add(account, rollouts, tokens)

    def move(self, rollouts: Collection[Rollout], origin: Account | AccountName, target: Account | AccountName) -> None:
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
        """Return the counts with reasons folded into their class; unused classes count 0."""
        folded = {str(account): 0 for account in Account}
        for account, count in counts.items():
            folded[account.partition("/")[0]] += count
        return folded

    def metrics(self) -> dict[str, float]:
        """Return running totals by class and by reason: ``accounts/<class>_tokens`` and ``_rollouts``."""
        values: dict[str, float] = {
            "accounts/generated_rollouts": self.generated_rollouts,
            "accounts/generated_tokens": self.generated_tokens,
            "accounts/tool_tokens": self.tool_tokens,
        }
        for unit, counts in (("rollouts", self.rollouts), ("tokens", self.tokens)):
            for account, count in {**self.by_class(counts), **counts}.items():
                values[f"accounts/{account}_{unit}"] = count
        return values | {f"accounts/reward_{name}": cost for name, cost in self.rewards.items()}

    def __repr__(self) -> str:
        trained = self.by_class(self.rollouts)[Account.TRAINED]
        return f"Accounts({self.generated_rollouts:,} rollouts generated, {trained:,} trained)"

    def _repr_html_(self) -> str:
        rows = [
            [account, f"{self.rollouts[account]:,}", f"{tokens:,}", f"{tokens / max(self.generated_tokens, 1):.1%}"]
            for account, tokens in sorted(self.tokens.items())
            if self.rollouts[account]
        ]
        total = ["generated", f"{self.generated_rollouts:,}", f"{self.generated_tokens:,}", ""]
        return Sheet(["account", "rollouts", "tokens", "share"], [*rows, total]).in_html()

    def state_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in vars(self):
            setattr(self, name, dict(state[name]) if isinstance(state[name], dict) else state[name])


class PausedRollouts:
    """The tokens that each paused rollout has written."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.tokens: dict[RolloutName, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def begin(self, event: Paused) -> None:
        self.tokens[event.uid, event.index] = event.tokens
        self._accounts.post(Account.PAUSED, event.tokens)

    def end(self, event: Event) -> int:
        """Take the charge of a rollout back and return its tokens; 0 if the rollout was not paused."""
        tokens = self.tokens.pop((event.uid, event.index), None)
        if tokens is not None:
            self._accounts.post(Account.PAUSED, -tokens, -1)
        return tokens or 0

    def retain(self, names: Collection[RolloutName]) -> None:
        """Let only these rollouts go on. The tokens of the others are lost, and count as cancelled."""
        for name in self.tokens.keys() - set(names):
            tokens = self.tokens.pop(name)
            self._accounts.post(Account.PAUSED, -tokens, -1)
            self._accounts.post(Account.CANCELLED, tokens)

    def state_dict(self) -> list[Any]:
        return [[uid, index, tokens] for (uid, index), tokens in self.tokens.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        self.tokens = {(uid, index): tokens for uid, index, tokens in state}
