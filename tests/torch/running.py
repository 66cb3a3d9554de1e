"""Runs `weft.moe` on a problem of cases.py, in the form in which reference.py answers."""

from __future__ import annotations

import torch
import weft_moe as weft
from cases import Problem
from torch import Tensor


def leaves_of(problem: Problem) -> list[list[Tensor]]:
    """x, topk_weights, gate_up and down, each a list with one entry a rank, that want gradients."""
    ranks = len(problem.x)
    lists = (
        problem.x,
        problem.topk_weights,
        problem.gate_up.chunk(ranks),
        problem.down.chunk(ranks),
    )
    return [[t.detach().clone().requires_grad_() for t in tensors] for tensors in lists]


def forward(
    problem: Problem,
    leaves: list[list[Tensor]],
    precision: str,
    group: weft.Group | None = None,
    **options,
) -> list[Tensor]:
    """y of each rank; without a group, on a virtual one that only y's graph keeps alive."""
    x, topk_weights, gate_up, down = leaves
    return weft.moe(
        x,
        problem.topk_idx,
        topk_weights,
        gate_up,
        down,
        group=weft.virtual_ep_group(len(x)) if group is None else group,
        num_experts=problem.num_experts,
        precision=precision,
        **options,
    )


def run(
    problem: Problem, precision: str, group: weft.Group | None = None, **options
) -> dict[str, list[Tensor]]:
    """y and all gradients, as lists with one entry a rank."""
    leaves = leaves_of(problem)
    y = forward(problem, leaves, precision, group, **options)
    torch.autograd.backward(y, problem.dy)
    dx, dtopk_weights, dgate_up, ddown = ([t.grad for t in tensors] for tensors in leaves)
    return {
        "y": [t.detach() for t in y],
        "dx": dx,
        "dtopk_weights": dtopk_weights,
        "dgate_up": dgate_up,
        "ddown": ddown,
    }


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference over the norm of what is expected, over all ranks. A NaN anywhere, and
    a value where 0 is expected, give an error that no bound admits."""
    actual, expected = (torch.cat([t.double().flatten() for t in ts]) for ts in (actual, expected))
    norm = float(expected.norm())
    difference = float((actual - expected).norm())
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def assert_close(
    actual: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], bound: float
) -> None:
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    # Not `> bound`: a NaN must fail.
    wrong = {name: error for name, error in errors.items() if not error <= bound}
    assert not wrong, f"relative errors {wrong}, allowed {bound}"


def assert_same_bits(actual: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    for name, tensors in expected.items():
        for rank, tensor in enumerate(tensors):
            assert torch.equal(actual[name][rank], tensor), f"{name} of rank {rank} differs"
