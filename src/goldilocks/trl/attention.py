"""Which of PyTorch's attention kernels a training on a GPU may use: all but cuDNN's.

Since PyTorch 2.11 cuDNN's is the default for a batch with a mask on an H100 or H200. Its backward pass returns NaN
where the length is 64 more than a multiple of 128 and some query's log-sum-exp is very low (pytorch/pytorch#196678).
TRL pads prompts on the left, and a query of padding attends to nothing: the loss is finite, the gradient is not, and one
such micro-batch ends a run.
"""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)


def avoid_cudnn(device: torch.device) -> None:
    """Turn cuDNN's attention off in this process; the next kernel in PyTorch's order takes its place.

    For the process rather than for a forward pass: gradient checkpointing runs a second one, in the backward pass.
    """
    if device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        logger.info("cuDNN's attention is off: its backward pass can return NaN for padded batches")
