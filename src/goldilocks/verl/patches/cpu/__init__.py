"""What verl needs to run on a machine without a GPU, without flash-attn, or beside a TRL that is newer than it."""

from __future__ import annotations

from goldilocks.verl.patches.cpu.loading import CRITIC_ATTENTION, TRL_VALUE_HEADS
from goldilocks.verl.patches.cpu.process_group import PROCESS_GROUP

PATCHES = (PROCESS_GROUP, CRITIC_ATTENTION, TRL_VALUE_HEADS)
