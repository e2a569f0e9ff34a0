"""Outcomes as two tables with a row per policy: what the policy yields, and where its tokens went."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from goldilocks.simulate.outcome import Outcome

LEGEND = """\
groups: groups whose rewards differ, trained or kept for the next batch; signal: Σ(r − r̄)² over
their trained rollouts; steps: engine steps until a batch is full, each writes a token in every
busy slot; hard reached: share of the prompts with a pass rate in (0, 0.2] that had such a group.
Below: where the tokens went."""


def figure(value: float | None, digits: int = 1) -> str:
    """Format a number; None is a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Format a share as a percentage; None is a dash."""
    return "-" if share is None else f"{100 * share:.1f}%"


def tables(outcomes: Sequence[Outcome]) -> Stack:
    """Return both tables with their legend."""
    return Stack(yield_table(outcomes), Text(f"\n{LEGEND}\n"), token_table(outcomes))


def yield_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of what each policy yields per rollout, per token and per batch."""
    table = _table(
        "groups per\n1k rollouts",
        "signal per\n1k rollouts",
        "groups per\n1M tokens",
        "signal per\n1M tokens",
        "batches",
        "steps per\nbatch",
        "hard\nreached",
    )
    for one in outcomes:
        table.add_row(
            one.policy,
            figure(one.informative_groups_per_1k_rollouts),
            figure(one.signal_per_1k_rollouts),
            figure(one.informative_groups_per_1m_tokens),
            figure(one.signal_per_1m_tokens),
            figure(one.batches, 0),
            figure(one.engine_steps_per_batch, 0),
            percent(one.hard_prompts_reached),
        )
    return table


def token_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of the share of tokens in each account; accounts that no policy used are left out."""
    used = [account for account in outcomes[0].token_share if any(one.token_share[account] for one in outcomes)]
    again = any(one.trained_again for one in outcomes)
    table = _table("rollouts", "tokens", *used, *(["trained\nagain"] if again else []), "pass rate\nat end")
    for one in outcomes:
        shares = [percent(one.token_share[account]) for account in used]
        shares += [percent(one.trained_again)] if again else []
        table.add_row(
            one.policy, f"{one.rollouts:,}", f"{one.tokens / 1e6:,.1f}M", *shares, figure(one.mean_pass_rate, 3)
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\npolicy", no_wrap=True)
    for column in columns:
        table.add_column(column if "\n" in column else f"\n{column}", justify="right", no_wrap=True)
    return table
