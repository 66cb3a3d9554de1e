"""Many launches of mixed calls under changing load: each gives the bits that it gave the first time."""

from __future__ import annotations

import random

import pytest
import torch

weft = pytest.importorskip("weft_moe", exc_type=ImportError)
_reason = (
    "no CUDA device is visible"
    if not torch.cuda.is_available()
    else weft.supports(hidden=256, intermediate=128, device="cuda", training=True)
)
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)

from problem import GRADIENTS, ROUTES, Problem, assert_same_bits  # noqa: E402 - it needs weft_moe

LAUNCHES = 10_000  # a training step is four: a plan and a kernel a direction
NUM_SMS = (0, 2, 38, 100)


PROBLEMS = (
    dict(num_tokens=1),
    dict(num_tokens=0),
    dict(num_tokens=127, num_experts=3, top_k=1),
    dict(num_tokens=513, num_experts=16, top_k=4),
    dict(num_tokens=300, route=ROUTES["masked"]),
    dict(num_tokens=300, route=ROUTES["all_to_one_expert"]),
    dict(num_tokens=777, hidden=512, intermediate=192, num_experts=60, top_k=6),
    dict(num_tokens=1000, num_experts=128, top_k=8),
)


def test_mixed_launches_repeat_their_bits() -> None:
    problems = [Problem(**options, seed=seed) for seed, options in enumerate(PROBLEMS)]
    expected = [problem.gradients() | {"y": problem.run()} for problem in problems]
    load = torch.cuda.Stream()
    chance = random.Random(0)
    for _ in range(LAUNCHES // 4):
        n = chance.randrange(len(problems))
        if chance.random() < 0.1:  # a kernel that holds an SM for a while
            with torch.cuda.stream(load):
                torch.cuda._sleep(chance.randrange(1_000_000))
        leaves = problems[n].leaves()
        y = problems[n].forward(leaves, num_sms=chance.choice(NUM_SMS))
        y.backward(problems[n].dy)
        actual = {name: leaf.grad for name, leaf in zip(GRADIENTS, leaves, strict=True)}
        assert_same_bits(actual | {"y": y.detach()}, expected[n], f"in problem {n}")
    weft.check()
    torch.cuda.synchronize()
