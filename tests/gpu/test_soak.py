"""Many launches of mixed calls under changing load and with injected delays: each gives the bits that it gave the
first time.

In processes of their own, which are killed when their time is over: a kernel that waits for ever cannot be ended
otherwise. WEFT_SOAK_LAUNCHES in the environment sets the number of launches.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

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
from test_ranks import ALL_ROUTES, Ranks, run_ranks  # noqa: E402
from weft_moe.debug import debugging  # noqa: E402

LAUNCHES = int(os.environ.get("WEFT_SOAK_LAUNCHES", "10000"))
LAUNCHES_A_STEP = 4  # of a rank: a plan and a kernel a direction
DEADLINE_S = 20.0
TIMEOUT_S = 120.0 + LAUNCHES / 50
NUM_SMS = (0, 2, 38, 100)
# What roles sleep at most, in nanoseconds: about a poll, a tile, and several tiles.
DELAYS = (500, 5_000, 50_000)

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


def _steps(num_ranks: int, delayed: bool) -> Iterator[random.Random]:
    """What a step chooses by, once a step, inside the delays of that step."""
    chance = random.Random(num_ranks)
    for step in range(LAUNCHES // (LAUNCHES_A_STEP * num_ranks)):
        if delayed:
            with debugging(max_delay_ns=chance.choice(DELAYS), seed=step):
                yield chance
        else:
            yield chance


def _one_rank(_, delayed: bool) -> None:
    problems = [Problem(**options, seed=seed) for seed, options in enumerate(PROBLEMS)]
    expected = [problem.gradients() | {"y": problem.run()} for problem in problems]
    load = torch.cuda.Stream()
    for chance in _steps(1, delayed):
        n = chance.randrange(len(problems))
        if chance.random() < 0.1:  # a kernel that holds an SM for a while
            with torch.cuda.stream(load):
                torch.cuda._sleep(chance.randrange(1_000_000))
        leaves = problems[n].leaves()
        options = dict(num_sms=chance.choice(NUM_SMS), save=chance.choice(("gate_up", "inputs")))
        y = problems[n].forward(leaves, deadline_s=DEADLINE_S, **options)
        y.backward(problems[n].dy)
        actual = {name: leaf.grad for name, leaf in zip(GRADIENTS, leaves, strict=True)}
        assert_same_bits(actual | {"y": y.detach()}, expected[n], f"in problem {n}, {options}")
    weft.check()
    torch.cuda.synchronize()


@pytest.mark.parametrize("delayed", [False, True], ids=["undelayed", "delayed"])
def test_mixed_launches_repeat_their_bits(delayed: bool) -> None:
    run_ranks(_one_rank, 1, delayed, timeout_s=TIMEOUT_S)


def _virtual_ranks(_, ep_size: int) -> None:
    group = weft.virtual_ep_group(ep_size, device="cuda", max_tokens=384)
    tokens = [384, 100, 0, 200][:ep_size]
    problems = [
        Ranks(tokens, route=route, seed=seed) for seed, route in enumerate(ALL_ROUTES.values())
    ]
    problems += [Ranks([384] * ep_size, num_experts=64, top_k=8, hidden=512, intermediate=384)]
    expected = [(problem.run(group), problem.gradients(group)) for problem in problems]
    for chance in _steps(ep_size, delayed=True):
        n = chance.randrange(len(problems))
        if chance.random() < 0.5:
            y = problems[n].run(group)
            same = zip(y, expected[n][0], strict=True)
        else:
            save = chance.choice(("gate_up", "inputs"))
            grads = problems[n].gradients(group, save=save)
            same = (
                pair
                for name in grads
                for pair in zip(grads[name], expected[n][1][name], strict=True)
            )
        assert all(torch.equal(a, b) for a, b in same), f"problem {n}"
    weft.check()
    torch.cuda.synchronize()


@pytest.mark.parametrize("ep_size", [2, 4])
def test_delayed_virtual_ranks_repeat_their_bits(ep_size: int) -> None:
    run_ranks(_virtual_ranks, 1, ep_size, timeout_s=TIMEOUT_S)
