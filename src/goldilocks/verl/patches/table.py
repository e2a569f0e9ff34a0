"""Every attribute of verl, and of the TransferQueue under it, that Goldilocks replaces; ``docs/patches.md`` shows it.

A patch is defined beside its code. torch and verl are imported only inside the replacements, so that this module costs
a process nothing.
"""

from __future__ import annotations

from goldilocks.verl.patch import Patch
from goldilocks.verl.patches.cpu import CRITIC_ATTENTION, PROCESS_GROUP, TRL_VALUE_HEADS
from goldilocks.verl.patches.log_probs import LOG_PROBS, RESPONSE_LOGITS
from goldilocks.verl.patches.micro_batches import ROWS_BY_LENGTH
from goldilocks.verl.patches.nested_rows import (
    LOSS_PADDING,
    ONE_PARTITION,
    ROW_SELECTION,
)
from goldilocks.verl.patches.one_pass import ONE_PASS
from goldilocks.verl.patches.packed_rows import PACKED_ROWS
from goldilocks.verl.patches.reports import FAILURES_HEARD, FAILURES_TOLD, GSPO_METRICS
from goldilocks.verl.patches.rewards import REWARDS_HERE
from goldilocks.verl.patches.trainers import GATHERED_PUTS, GROUP_NUMBERS, V0_TRAINER
from goldilocks.verl.patches.vllm import LARGEST_LOG_PROB, WEIGHTS_WATCHED

PATCHES: tuple[Patch, ...] = (
    PROCESS_GROUP,
    CRITIC_ATTENTION,
    TRL_VALUE_HEADS,
    LOG_PROBS,
    ONE_PASS,
    ROWS_BY_LENGTH,
    RESPONSE_LOGITS,
    LOSS_PADDING,
    ROW_SELECTION,
    ONE_PARTITION,
    PACKED_ROWS,
    REWARDS_HERE,
    GATHERED_PUTS,
    GROUP_NUMBERS,
    FAILURES_TOLD,
    FAILURES_HEARD,
    WEIGHTS_WATCHED,
    GSPO_METRICS,
    LARGEST_LOG_PROB,
    V0_TRAINER,
)
