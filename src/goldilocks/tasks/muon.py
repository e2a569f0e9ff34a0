"""Muon: momentum whose every step is an orthogonal matrix (Jordan et al. 2024), for a model's hidden matrices.

torch has one, in bfloat16; on a CPU without bfloat16 units that is slower than all the rest of a tiny model's step.
This one keeps the type of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

MOMENTUM = 0.95
# Coefficients of the quintic that drives singular values towards one, from the paper's reference code.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For matrices only; steps have the size of Adam's, so that one learning rate fits both."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """One step along the orthogonalised Nesterov momentum."""
        for group in self.param_groups:
            lr, decay = group["lr"], group["weight_decay"]
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
                matrix.mul_(1 - lr * decay).add_(update, alpha=-0.2 * lr * max(matrix.shape) ** 0.5)
        return None


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values moved close to one, by Newton–Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.T if tall else x
