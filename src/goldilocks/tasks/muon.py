"""Muon: momentum whose steps are orthogonal matrices (Jordan et al. 2024), for a model's hidden matrices.

torch's own Muon computes in bfloat16, which is slow on a CPU without bfloat16 units. This one keeps the type of the
parameters.
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
    """For matrices only. Steps have the size of Adam's, so that one learning rate fits both."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step along the orthogonalised Nesterov momentum."""
        for group in self.param_groups:
            for matrices in _alike(group["params"]):
                # Matrices of one shape are stacked: the number of operations costs more than their size.
                updates = orthogonal(torch.stack([self._momentum(matrix) for matrix in matrices]))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)
        return None

    def _momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        momentum = state.setdefault("momentum", torch.zeros_like(matrix))
        momentum.lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(momentum, MOMENTUM)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The matrices with their singular values moved close to one, by Newton–Schulz iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


def _alike(matrices: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    return by_shape.values()
