"""Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

# Coefficients of the quintic Newton-Schulz iteration that Muon's author found (Keller Jordan, 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
SMALLEST = 16


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns of the matrix (or of each of a stack of experts) that Muon is for; None for AdamW: embeddings,
    convolutions, gates and vectors."""
    if len(shape) < 2 or "embed_tokens" in name or "pos_embed" in name or "conv1d" in name:
        return None
    rows, columns = shape[-2:] if "experts." in name and len(shape) == 3 else (shape[0], math.prod(shape[1:]))
    return (rows, columns) if min(rows, columns) >= SMALLEST else None


def orthogonal(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[n, r, c] -> about the nearest matrices with all singular values 1; multiplied in `dtype`."""
    a, b, c = QUINTIC
    x = matrices.to(dtype)
    turned = x.shape[-2] > x.shape[-1]
    if turned:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(dtype)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if turned else x).float()


class Optimizer:
    """One step for a dict of leaves with .grad. The momentum is the state; equal on all processes."""

    def __init__(
        self, parameters: dict[str, Tensor], rank: int, processes: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.p, self.rank, self.processes, self.dtype = parameters, rank, processes, dtype
        self.state: dict[str, dict[str, Tensor]] = {}
        self.counts: dict[str, int] = {}
        groups: dict[tuple[int, int], list[str]] = {}
        self.adam: list[str] = []
        for name, value in parameters.items():
            shape = matrix_shape(name, tuple(value.shape))
            if shape is not None:
                self.state[name] = {"momentum": torch.zeros_like(value)}
                groups.setdefault(shape, []).append(name)
            else:
                self.state[name] = {"first": torch.zeros_like(value), "second": torch.zeros_like(value)}
                self.adam.append(name)
        self.groups = groups

    @torch.no_grad()
    def step(
        self, names: set[str], muon_rate: float, adam_rate: float, decay: float = 0.01, momentum: float = 0.95
    ) -> None:
        """Updates the parameters in `names` that have a gradient; others keep their state."""
        updates: dict[str, Tensor] = {}
        turn = 0
        for shape, group in self.groups.items():
            mine: list[tuple[str, Tensor]] = []
            for name in group:
                if name not in names or self.p[name].grad is None:
                    continue
                grad, moment = self.p[name].grad, self.state[name]["momentum"]
                moment.lerp_(grad, 1 - momentum)
                if turn % self.processes == self.rank:
                    mine.append((name, grad.lerp(moment, momentum).reshape(-1, *shape)))
                updates[name] = torch.zeros_like(moment)
                turn += 1
            if mine:
                done = orthogonal(torch.cat([matrix for _, matrix in mine]), dtype=self.dtype)
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (name, _), part in zip(mine, done.split([len(matrix) for _, matrix in mine]), strict=True):
                    updates[name] = (part * scale).reshape(self.p[name].shape)
        if self.processes > 1 and updates:
            flat = torch.cat([update.flatten() for update in updates.values()])
            dist.all_reduce(flat)
            for update, part in zip(updates.values(), flat.split([u.numel() for u in updates.values()]), strict=True):
                update.copy_(part.view_as(update))
        for name, update in updates.items():
            self.p[name].mul_(1 - muon_rate * decay).sub_(update, alpha=muon_rate)
        for name in self.adam:
            if name in names and self.p[name].grad is not None:
                self._adam(name, adam_rate)

    def _adam(self, name: str, rate: float, beta: tuple[float, float] = (0.9, 0.98)) -> None:
        grad, state = self.p[name].grad, self.state[name]
        self.counts[name] = count = self.counts.get(name, 0) + 1
        state["first"].lerp_(grad, 1 - beta[0])
        state["second"].lerp_(grad * grad, 1 - beta[1])
        size = (state["second"] / (1 - beta[1] ** count)).sqrt_().add_(1e-8)
        self.p[name].addcdiv_(state["first"] / (1 - beta[0] ** count), size, value=-rate)
