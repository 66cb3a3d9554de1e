"""The layer by its definition: dense, one expert at a time, differentiated by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cases import Problem
from torch import Tensor


def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    clamp_limit: float | None = None,
) -> Tensor:
    """x [T, H], topk_idx, topk_weights [T, K], gate_up [E, 2I, H], down [E, H, I] -> y [T, H]."""
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        if clamp_limit is not None:
            gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
        a = topk_weights[token, slot, None] * F.silu(gate) * up
        y = y.index_add(0, token, a @ down[expert].T)
    return y


def run(problem: Problem, clamp_limit: float | None = None) -> dict[str, list[Tensor]]:
    """y and all gradients in fp64, as lists with one entry a rank; those of the experts too."""
    leaves = [
        torch.cat([t.double() for t in tensors]).requires_grad_()
        for tensors in (problem.x, problem.topk_weights, [problem.gate_up], [problem.down])
    ]
    x, topk_weights, gate_up, down = leaves
    y = moe(x, torch.cat(problem.topk_idx), topk_weights, gate_up, down, clamp_limit)
    dx, dtopk_weights, dgate_up, ddown = torch.autograd.grad(
        y, leaves, torch.cat(problem.dy).double()
    )
    tokens = [len(t) for t in problem.x]
    ranks = len(tokens)
    return {
        "y": y.detach().split(tokens),
        "dx": dx.split(tokens),
        "dtopk_weights": dtopk_weights.split(tokens),
        "dgate_up": dgate_up.chunk(ranks),
        "ddown": ddown.chunk(ranks),
    }
