"""No attention by cuDNN, whose backward pass is wrong for some lengths.

Since torch 2.11 masked attention on an H100 or H200 goes to cuDNN by default. Where the sequence is 64 longer than a
multiple of 128, and all scores of a query are below about -89, the gradient of that query is NaN (pytorch issue
196678). Training meets such lengths and queries. Importing this module selects torch's other kernels.
"""

from __future__ import annotations

import torch


def avoid() -> None:
    """Leave attention to torch's other kernels, in this process."""
    torch.backends.cuda.enable_cudnn_sdp(False)


avoid()
