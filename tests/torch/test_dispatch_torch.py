"""The unfused baseline against a dense reference that handles one route at a time in fp64."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from weft_moe.train.dispatch import MoeLayer, TorchDispatch, check_dispatch, make_dispatch

HIDDEN, INTERMEDIATE = 8, 16
NAMES = ("y", "dx", "dtopk_weights", "dgate_up", "ddown")


def routing(seed, tokens, num_experts, top_k):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, num_experts, generator=generator).topk(top_k).indices for n in tokens]


def masked_routing():
    """A tenth of the routes masked, and a token on each rank that goes nowhere."""
    ranks = routing(3, [20, 13], 4, 2)
    generator = torch.Generator().manual_seed(4)
    for idx in ranks:
        idx[torch.rand(idx.shape, generator=generator) < 0.1] = -1
        idx[5] = -1
    return ranks


# Case -> (num_experts, top-k indices [T, K] of each of two ranks).
CASES = {
    "random": (4, routing(0, [7, 5], 4, 2)),
    "no tokens on one rank": (4, routing(1, [0, 6], 4, 2)),
    "no tokens at all": (4, routing(2, [0, 0], 4, 2)),
    "uneven": (6, routing(5, [1, 97], 6, 3)),
    "all routes to rank 0": (4, [torch.tensor([[0, 1]] * 6), torch.tensor([[1, 0]] * 4)]),
    "all routes to rank 1": (4, [torch.tensor([[2, 3]] * 6), torch.tensor([[3, 2]] * 4)]),
    "one expert only": (4, [torch.full((6, 1), 2), torch.full((3, 1), 2)]),
    "every expert": (4, routing(6, [3, 4], 4, 4)),
    "masked routes": (4, masked_routing()),
    "all routes masked": (4, [torch.full((3, 2), -1), torch.full((2, 2), -1)]),
    "an expert twice": (4, [torch.tensor([[1, 1], [3, 3]]), torch.tensor([[0, 0]])]),
    "odd group sizes": (
        8,
        [
            torch.arange(8).repeat_interleave(torch.tensor([1, 31, 33, 63, 65, 2, 0, 5]))[:, None],
            torch.arange(8).repeat_interleave(torch.tensor([0, 1, 0, 2, 62, 127, 0, 1]))[:, None],
        ],
    ),
}


def tensors(case):
    """gate_up, down, and each rank's (x, topk_idx, topk_weights, dy), all fp64."""
    num_experts, ranks = CASES[case]
    generator = torch.Generator().manual_seed(len(case))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_up = normal(num_experts, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    down = normal(num_experts, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    inputs = []
    for idx in ranks:
        x, weights = normal(len(idx), HIDDEN), normal(*idx.shape).abs()
        # Nothing may read what belongs to a masked route.
        x[(idx < 0).all(1)] = torch.nan
        weights[idx < 0] = torch.nan
        inputs.append((x, idx, weights, normal(len(idx), HIDDEN)))
    return gate_up, down, inputs


def reference(x, topk_idx, topk_weights, gate_up, down):
    zero = 0 * gate_up[0, 0]  # part of the graph, so that backward works without any route
    rows = [zero for _ in x]
    for token, experts in enumerate(topk_idx.tolist()):
        for slot, expert in enumerate(experts):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                o = down[expert] @ (F.silu(gate) * up)
                rows[token] = rows[token] + topk_weights[token, slot] * o
    return torch.stack(rows) if rows else x + zero


def forward_backward(function, x, topk_idx, topk_weights, gate_up, down, dy):
    """y, dx, dtopk_weights, dgate_up, ddown."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, topk_weights, gate_up, down)]
    y = function(leaves[0], topk_idx, *leaves[1:])
    # A rank that has no route to anybody still takes part in the others' backward.
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


def expected(case):
    """The reference over all ranks' tokens at once."""
    gate_up, down, inputs = tensors(case)
    x, idx, weights, dy = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    return forward_backward(reference, x, idx, weights, gate_up, down, dy)


def layer(num_experts, process_group=None, precision="fp32", device="cpu"):
    return MoeLayer(
        num_experts, HIDDEN, INTERMEDIATE, precision, process_group, torch.device(device)
    )


def run_case(case, rank, process_group, precision, is_grouped=False, device="cpu"):
    """One rank's part of a case; without a group, the tokens of all ranks."""
    gate_up, down, inputs = tensors(case)
    dispatch = TorchDispatch(layer(CASES[case][0], process_group, precision, device))
    dispatch.is_grouped |= is_grouped
    mine = slice(rank * dispatch.num_local, (rank + 1) * dispatch.num_local)
    if process_group is None:
        inputs = [[torch.cat(parts) for parts in zip(*inputs, strict=True)]]
    x, idx, weights, dy = (t.to(device) for t in inputs[rank])
    results = forward_backward(
        dispatch,
        x.to(dispatch.dtype),
        idx,
        weights.float(),
        gate_up[mine].to(device, dispatch.dtype),
        down[mine].to(device, dispatch.dtype),
        dy,
    )
    return [t.cpu() for t in results]


def run_all_cases(rank, precision, is_grouped):
    return {case: run_case(case, rank, dist.group.WORLD, precision, is_grouped) for case in CASES}


@pytest.fixture(scope="module")
def two_ranks():
    """(precision, grouped) -> each rank's results of every case."""
    variants = [("fp32", False), ("bf16", False), ("bf16", True)]
    return {variant: run_ranks(run_all_cases, 2, *variant) for variant in variants}


def joined(ranks):
    """The ranks' tokens and experts side by side, as the reference has them."""
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]


def assert_close(got, want, precision):
    """Within rounding: for bf16, some roundings of 2^-8 of the largest value in the chain."""
    tolerance = {"fp32": 1e-5, "bf16": 3e-2}[precision]
    for name, a, b in zip(NAMES, got, want, strict=True):
        scale = b.abs().max().item() if b.numel() else 0.0
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(
            a.double(), b, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_zeros(case, got):
    """Masked routes and experts without rows get exactly nothing."""
    num_experts, ranks = CASES[case]
    idx = torch.cat(ranks)
    y, dx, dweights, dgate_up, ddown = got
    nowhere = (idx < 0).all(1)
    assert not y[nowhere].any()
    assert not dx[nowhere].any()
    assert not dweights[idx < 0].any()
    idle = [x for x in range(num_experts) if not (idx == x).any()]
    assert not dgate_up[idle].any()
    assert not ddown[idle].any()


@pytest.mark.parametrize("variant", [("fp32", False), ("bf16", False), ("bf16", True)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_the_reference(two_ranks, case, variant):
    got = joined([results[case] for results in two_ranks[variant]])
    assert_close(got, expected(case), variant[0])
    assert_zeros(case, got)


@pytest.mark.parametrize("case", CASES)
def test_one_rank_equals_the_reference(case):
    got = run_case(case, 0, None, "fp32")
    assert_close(got, expected(case), "fp32")
    assert_zeros(case, got)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", TorchDispatch.precisions)
def test_cuda_equals_the_reference(case, precision):
    got = run_case(case, 0, None, precision, device="cuda")
    assert_close(got, expected(case), precision)
    assert_zeros(case, got)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_routing_equals_the_reference(data):
    num_experts = data.draw(st.integers(1, 7))
    num_tokens, top_k = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4))
    expert = st.integers(-1, num_experts - 1)
    routes = data.draw(st.lists(expert, min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    idx = torch.tensor(routes, dtype=torch.int64).view(num_tokens, top_k)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    shapes = [
        (num_tokens, HIDDEN),
        idx.shape,
        (num_experts, 2 * INTERMEDIATE, HIDDEN),
        (num_experts, HIDDEN, INTERMEDIATE),
        (num_tokens, HIDDEN),
    ]
    x, weights, gate_up, down, dy = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    dispatch = TorchDispatch(layer(num_experts))
    got = forward_backward(dispatch, x, idx, weights, gate_up, down, dy)
    want = forward_backward(reference, x, idx, weights, gate_up, down, dy)
    for name, a, b in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("wrong", [4, -2])
def test_index_out_of_range_names_token_and_slot(wrong):
    idx = torch.tensor([[0, 1], [2, wrong]])
    dispatch = TorchDispatch(layer(4))
    with pytest.raises(ValueError, match=rf"topk_idx\[1, 1\] = {wrong}: .* 0 to 3, or -1"):
        dispatch(torch.zeros(2, HIDDEN), idx, torch.ones(2, 2), None, None)


@pytest.mark.parametrize(
    ("type", "precision", "words"),
    [
        ("nccl", "bf16", r"type = 'nccl': choose one of 'mega_moe', 'torch', 'transformers'"),
        ("torch", "fp4", r"precision = 'fp4': choose one of 'fp32', 'bf16', 'fp8'"),
        ("torch", "fp8", r"that type does 'fp32', 'bf16'; types that do 'fp8': 'mega_moe'"),
        ("transformers", "mxfp8", r"that type does 'fp32', 'bf16'; types that do 'mxfp8': 'mega"),
    ],
)
def test_unknown_or_impossible_choices_are_refused(type, precision, words):
    with pytest.raises(ValueError, match=words):
        check_dispatch(type, precision)


def test_experts_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"num_experts = 6 cannot be shared evenly by 4"):
        make_dispatch("torch", layer(6, process_group=SimpleNamespace(size=lambda: 4)))


def test_sizes_that_the_grouped_product_cannot_take_are_refused():
    cuda = MoeLayer(4, 12, 16, "bf16", None, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"hidden = 12, intermediate = 16: .* multiples of 8"):
        make_dispatch("torch", cuda)


def test_transformers_experts_take_whole_rows_on_any_device():
    with pytest.raises(ValueError, match=r"hidden = 12, intermediate = 16: in bf16 .* of 8"):
        make_dispatch("transformers", MoeLayer(4, 12, 16, "bf16", None, torch.device("cpu")))
    make_dispatch("transformers", MoeLayer(4, 12, 16, "fp32", None, torch.device("cpu")))


def test_transformers_experts_are_not_shared():
    group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match=r"'transformers' cannot run here: ep = 2: .* ep = 1"):
        make_dispatch("transformers", layer(4, process_group=group))


def test_mega_moe_passes_on_why_it_cannot_run(monkeypatch):
    weft_moe = SimpleNamespace(supports=lambda **_: "hidden = 8 is no multiple of 128")
    monkeypatch.setitem(sys.modules, "weft_moe", weft_moe)
    with pytest.raises(ValueError, match="'mega_moe' cannot run here: hidden = 8 is no multiple"):
        make_dispatch("mega_moe", layer(4))
