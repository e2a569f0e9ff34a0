"""Every attribute of verl, and of the TransferQueue and vLLM under it, that Goldilocks replaces (``docs/patches.md``).

A patch is defined beside its code. torch and verl are imported only inside the replacements, so that this module costs
a process nothing.
"""

from __future__ import annotations

from goldilocks.verl.patch import Patch
from goldilocks.verl.patches import cpu, speed, trainers, vllm

PATCHES: tuple[Patch, ...] = (
    cpu.PROCESS_GROUP,
    cpu.CRITIC_ATTENTION,
    cpu.TRL_VALUE_HEADS,
    speed.LOG_PROBS,
    speed.ONE_PASS,
    speed.ROWS_BY_LENGTH,
    speed.PACKED_ROWS,
    trainers.CUDNN_ATTENTION,
    trainers.FAILURES_TOLD,
    trainers.FAILURES_HEARD,
    vllm.HELD_OUTPUTS,
    vllm.WEIGHTS_WATCHED,
    vllm.WEIGHTS_APART,
    trainers.GSPO_METRICS,
    vllm.LARGEST_LOG_PROB,
    trainers.V0_TRAINER,
)
