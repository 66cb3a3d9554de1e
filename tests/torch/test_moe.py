"""weft.moe against the dense reference: routings, precisions, options."""

from __future__ import annotations

import pytest
import torch
import weft_moe as weft
from cases import ROUTINGS, make_problem, random_routing
from running import assert_close, assert_same_bits, forward, leaves_of, run

import reference

# Precision -> the largest relative error of y and every gradient. fp64 has its router weights in
# fp32. In fp8 each operand of a product is off by 2-3 % (4 significant bits), in two or three
# products one after the other.
BOUNDS = {"fp64": 1e-6, "fp32": 2e-6, "bf16": 8e-3, "fp8_bwd": 9e-2, "fp8": 9e-2, "mxfp8": 9e-2}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_routings(name, save):
    problem = make_problem(ROUTINGS[name](), 20, 12, torch.float32)
    assert_close(run(problem, "fp32", save=save), reference.run(problem), BOUNDS["fp32"])


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_precisions(precision, save):
    routing = random_routing(8, 2, [70, 0, 41, 130], masked=0.1)
    problem = make_problem(routing, 128, 128, DTYPES.get(precision, torch.bfloat16))
    assert_close(run(problem, precision, save=save), reference.run(problem), BOUNDS[precision])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_same_bits_every_time_and_in_either_save(precision):
    routing = random_routing(8, 3, [70, 41], masked=0.1)
    problem = make_problem(routing, 128, 128, DTYPES.get(precision, torch.bfloat16))
    first = run(problem, precision)
    assert_same_bits(run(problem, precision), first)
    assert_same_bits(run(problem, precision, save="inputs"), first)


def test_clamp():
    problem = make_problem(random_routing(4, 2, [50, 30]), 16, 16, torch.float32)
    clamped = reference.run(problem, clamp_limit=0.5)
    assert not torch.allclose(clamped["y"][0], reference.run(problem)["y"][0], rtol=0.1)
    assert_close(run(problem, "fp32", clamp_limit=0.5), clamped, BOUNDS["fp32"])


def test_experts_without_rows_get_gradients_of_exactly_zero():
    problem = make_problem(ROUTINGS["all tokens alike"](), 16, 16, torch.float32)
    grads = run(problem, "fp32")
    idle = [expert for expert in range(8) if expert not in (1, 3, 6)]
    for name in ("dgate_up", "ddown"):
        assert not torch.cat(grads[name])[idle].any()
        assert torch.cat(grads[name])[[1, 3, 6]].any()


def test_int32_and_int64_indices_are_the_same():
    problem = make_problem(random_routing(4, 2, [9, 5], masked=0.2), 8, 8, torch.float32)
    expected = run(problem, "fp32")
    problem.topk_idx = [idx.int() for idx in problem.topk_idx]
    assert_same_bits(run(problem, "fp32"), expected)


def test_one_rank_takes_tensors():
    problem = make_problem(ROUTINGS["one rank"](), 16, 16, torch.float32)
    (x,), (topk_weights,), (gate_up,), (down,) = leaves_of(problem)
    y = weft.moe(
        x, problem.topk_idx[0], topk_weights, gate_up, down, num_experts=8, precision="fp32"
    )
    y.backward(problem.dy[0])
    expected = run(problem, "fp32")
    assert torch.equal(y, expected["y"][0])
    assert torch.equal(x.grad, expected["dx"][0])
    assert torch.equal(down.grad, expected["ddown"][0])


def test_token_counts_that_change_every_step():
    group = weft.virtual_ep_group(2)
    for tokens in ([3, 400], [200, 0], [0, 0], [1, 1], [700, 130]):
        problem = make_problem(random_routing(4, 2, tokens), 16, 16, torch.float32)
        assert_close(run(problem, "fp32", group), reference.run(problem), BOUNDS["fp32"])


def test_weights_that_change_and_move_between_steps():
    group = weft.virtual_ep_group(2)
    problem = make_problem(random_routing(4, 2, [30, 20]), 128, 128, torch.bfloat16)
    for _ in range(2):
        for precision in ("bf16", "fp8"):
            assert_close(run(problem, precision, group), reference.run(problem), BOUNDS[precision])
        problem.gate_up = problem.gate_up * -0.5  # a new address
        problem.down.mul_(2.0)  # the old one


def test_one_group_serves_layers_of_different_shapes_in_turn():
    group = weft.virtual_ep_group(2)
    problems = [
        make_problem(random_routing(experts, top_k, [33, 65]), hidden, intermediate, torch.float32)
        for experts, top_k, hidden, intermediate in ((4, 1, 8, 24), (16, 5, 40, 16), (2, 2, 16, 8))
    ]
    for problem in problems * 2:
        assert_close(run(problem, "fp32", group), reference.run(problem), BOUNDS["fp32"])


def test_the_same_output_without_gradients():
    problem = make_problem(random_routing(4, 2, [9, 5]), 16, 16, torch.float32)
    with torch.no_grad():
        y = forward(problem, leaves_of(problem), "fp32")
    assert not any(t.requires_grad for t in y)
    assert_same_bits({"y": y}, {"y": run(problem, "fp32")["y"]})


def test_module_is_router_and_experts():
    torch.manual_seed(0)
    layer = weft.MoE(16, 24, 6, 3, precision="fp32", normalize_topk=True)
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == {
        "router.weight": (6, 16),
        "gate_up": (6, 48, 16),
        "down": (6, 16, 24),
    }
    x = torch.randn(2, 7, 16)
    probabilities = (x.view(14, 16) @ layer.router.weight.T).softmax(-1)
    topk_weights, topk_idx = probabilities.topk(3)
    topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    expected = reference.moe(x.view(14, 16), topk_idx, topk_weights, layer.gate_up, layer.down)
    torch.testing.assert_close(layer(x), expected.view(2, 7, 16))


def test_routes_are_the_same_under_autocast():
    torch.manual_seed(0)
    layer = weft.MoE(64, 64, 16, 2)
    x = torch.randn(40, 64).bfloat16()
    expected = layer.route(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(layer.route(x), expected, strict=True))


def test_module_on_virtual_ranks_equals_module_on_one():
    torch.manual_seed(0)
    one = weft.MoE(16, 24, 8, 2, precision="fp64")
    four = weft.MoE(16, 24, 8, 2, precision="fp64", group=weft.virtual_ep_group(4))
    four.load_state_dict(one.state_dict())
    x = [torch.randn(n, 16, dtype=torch.float64) for n in (5, 0, 3, 9)]
    y = four(x)
    torch.testing.assert_close(torch.cat(y), one(torch.cat(x)))
    torch.cat(y).square().sum().backward()
    one(torch.cat(x)).square().sum().backward()
    for a, b in zip(four.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
