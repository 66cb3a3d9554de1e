"""The one list of adversarial routings of the Python tests, and tensors to go with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """num_experts over all ranks, and topk_idx [T, K] int64 of each rank."""

    num_experts: int
    topk_idx: list[Tensor]

    @property
    def ep_size(self) -> int:
        return len(self.topk_idx)


@dataclass
class Problem:
    """One layer on all ranks: lists have one entry a rank, all experts lie in one tensor."""

    num_experts: int
    x: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    gate_up: Tensor
    down: Tensor
    dy: list[Tensor]


def make_problem(
    routing: Routing, hidden: int, intermediate: int, dtype: torch.dtype = torch.float64
) -> Problem:
    """Random tensors; NaN wherever nothing may look: x of a token without routes, and the router
    weight of a masked route."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(dtype)

    x, topk_weights, dy = [], [], []
    for idx in routing.topk_idx:
        x.append(normal(len(idx), hidden).masked_fill((idx < 0).all(1, keepdim=True), torch.nan))
        weights = torch.rand(idx.shape, generator=generator)
        topk_weights.append(weights.masked_fill(idx < 0, torch.nan))
        dy.append(normal(len(idx), hidden))
    return Problem(
        routing.num_experts,
        x,
        routing.topk_idx,
        topk_weights,
        normal(routing.num_experts, 2 * intermediate, hidden, std=hidden**-0.5),
        normal(routing.num_experts, hidden, intermediate, std=intermediate**-0.5),
        dy,
    )


def random_routing(
    num_experts: int, top_k: int, tokens: list[int], masked: float = 0.0, seed: int = 0
) -> Routing:
    """Distinct experts for each token, uniformly, with a share of the routes masked."""
    generator = torch.Generator().manual_seed(seed)
    topk_idx = []
    for num_tokens in tokens:
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        mask = torch.rand(num_tokens, top_k, generator=generator) < masked
        topk_idx.append(scores.topk(top_k).indices.masked_fill(mask, -1))
    return Routing(num_experts, topk_idx)


def _masked_tokens() -> Routing:
    routing = random_routing(8, 2, [9, 9], masked=0.1, seed=1)
    routing.topk_idx[0][:3] = -1
    routing.topk_idx[1][-1] = -1
    return routing


def _group_sizes(rows: list[int]) -> Routing:
    """Expert x gets rows[x] routes, dealt to two ranks in a random order, one a token."""
    deck = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    deck = deck[torch.randperm(len(deck), generator=torch.Generator().manual_seed(2))]
    return Routing(len(rows), [deck[::2, None].contiguous(), deck[1::2, None].contiguous()])


ROUTINGS: dict[str, Callable[[], Routing]] = {
    "one rank": lambda: random_routing(8, 2, [133]),
    "one expert": lambda: random_routing(1, 1, [5]),
    "one token": lambda: random_routing(4, 2, [1, 0]),
    "two ranks": lambda: random_routing(8, 2, [7, 5]),
    "a rank without tokens": lambda: random_routing(8, 2, [5, 0, 7, 3]),
    "no tokens at all": lambda: random_routing(8, 2, [0, 0]),
    "uneven tokens": lambda: random_routing(16, 4, [0, 1, 777, 4096]),
    "all routes to one rank": lambda: Routing(
        8, [i + 4 for i in random_routing(4, 2, [60, 40]).topk_idx]
    ),
    "all routes to one expert": lambda: Routing(
        8, [torch.full((n, 1), 5) for n in (130, 140, 0, 150)]
    ),
    "all tokens alike": lambda: Routing(
        8, [torch.tensor([[3, 6, 1]]).repeat(n, 1) for n in (200, 90)]
    ),
    "masked routes": lambda: random_routing(16, 4, [90, 110], masked=0.1),
    "masked tokens": _masked_tokens,
    "all routes masked": lambda: random_routing(8, 2, [9, 4], masked=1.0),
    "an expert twice": lambda: Routing(4, [torch.tensor([[1, 1], [3, 2]]), torch.tensor([[0, 0]])]),
    "odd group sizes": lambda: _group_sizes([1, 31, 33, 63, 65, 127, 129, 0]),
    "60 experts on 3 ranks": lambda: random_routing(60, 6, [50, 60, 70]),
    "512 experts": lambda: random_routing(512, 16, [40, 50]),
    "top 32": lambda: random_routing(64, 32, [33, 20], masked=0.1),
}
