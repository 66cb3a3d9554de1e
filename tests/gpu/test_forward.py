"""The fused forward on a GPU: against fp64, bit for bit from run to run, under what users do to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

weft = pytest.importorskip("weft_moe", exc_type=ImportError)
_reason = (
    "no CUDA device is visible"
    if not torch.cuda.is_available()
    else weft.supports(hidden=256, intermediate=128, device="cuda", training=False)
)
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)

from problem import DEVICE, ROUTES, SHAPES, Problem, masked  # noqa: E402 - it needs weft_moe


@pytest.mark.parametrize("name", SHAPES)
def test_shape_agrees_with_fp64(name: str) -> None:
    Problem(**SHAPES[name]).check()


@pytest.mark.parametrize("name", ROUTES)
def test_routing_agrees_with_fp64(name: str) -> None:
    Problem(num_tokens=700, route=ROUTES[name]).check()


def test_clamp_limit() -> None:
    Problem(num_tokens=500).check(clamp_limit=0.75)


def test_no_tokens() -> None:
    assert Problem(num_tokens=0).run().shape == (0, 256)


def test_masked_tokens_are_exactly_zero_and_may_hold_nan() -> None:
    problem = Problem(num_tokens=300, route=masked)
    clean = problem.run()
    problem.x[:3] = float("nan")
    y = problem.run()
    assert torch.equal(y, clean)
    assert (y[:3] == 0).all()


def test_runs_are_bitwise_equal_on_few_sms_on_many_and_on_another_stream() -> None:
    problem = Problem(num_tokens=1500, hidden=512, intermediate=256, num_experts=16, top_k=4)
    expected = problem.run()
    for num_sms in (0, 1, 7, 64):
        assert torch.equal(problem.run(num_sms=num_sms), expected), num_sms
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = problem.run()
    stream.synchronize()
    assert torch.equal(y, expected)


def test_saves_z_for_a_backward() -> None:
    """With save = "gate_up" the forward keeps z of every row: routed rows of the plan, rounded once."""
    problem = Problem(num_tokens=257, route=masked)
    expected = problem.run()
    x = problem.x.requires_grad_()
    y = weft.moe(
        x, problem.topk_idx, problem.topk_weights, problem.gate_up, problem.down,
        num_experts=problem.num_experts, save="gate_up",
    )  # fmt: skip
    assert torch.equal(y, expected)
    z = y.grad_fn.saved_tensors[5].view(torch.bfloat16).view(-1, 2 * 128)
    first_block = 0
    for expert in range(problem.num_experts):
        token, _ = (problem.topk_idx == expert).nonzero(as_tuple=True)
        exact = problem.x.detach()[token].double() @ problem.gate_up[expert].double().T
        rows = z[first_block * 128 : first_block * 128 + len(token)].double()
        assert (rows - exact).norm() <= 4e-3 * exact.norm()
        first_block += -(-len(token) // 128)


def test_a_captured_graph_replays_with_new_routing_and_new_values() -> None:
    problem, other = Problem(num_tokens=400, seed=1), Problem(num_tokens=400, seed=2, route=masked)
    expected = [problem.run(), other.run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = problem.run()
    graph.replay()
    assert torch.equal(y, expected[0])
    for name in ("x", "gate_up", "down", "topk_idx", "topk_weights"):
        getattr(problem, name).copy_(getattr(other, name))
    graph.replay()
    assert torch.equal(y, expected[1])


@pytest.mark.skipif(bool(weft.supports(hidden=256, intermediate=128)), reason="no CPU backend")
def test_calls_on_the_cpu_between_calls_on_the_gpu() -> None:
    """Both use the group of this process, and each needs memory of its own device."""
    problem = Problem(num_tokens=100)
    on_cpu = [t.cpu() for t in (problem.x, problem.topk_idx, problem.topk_weights)]
    on_cpu += [problem.gate_up.cpu(), problem.down.cpu()]
    expected = weft.moe(*on_cpu, num_experts=problem.num_experts)
    y = problem.check()
    assert torch.equal(weft.moe(*on_cpu, num_experts=problem.num_experts), expected)
    assert torch.equal(problem.run(), y)


def test_a_kernel_that_holds_sms_does_not_stop_the_call() -> None:
    problem = Problem(num_tokens=1000, num_experts=16, top_k=4)
    expected = problem.run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(2e8))
    y = problem.run()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_an_index_out_of_range_is_told_by_the_next_call_and_the_layer_stays_usable() -> None:
    problem = Problem()
    expected = problem.run()
    good = problem.topk_idx[7, 1].item()
    problem.topk_idx[7, 1] = 8
    problem.run()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"rank 0 at token 7, slot 1 is 8; allowed: 0 to 7"):
        problem.run()
    problem.run()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"rank 0 at token 7, slot 1 is 8; allowed: 0 to 7"):
        weft.check()
    weft.check()  # a fault is told once
    problem.topk_idx[7, 1] = good
    assert torch.equal(problem.run(), expected)


def test_what_the_backend_cannot_do_is_said_in_words() -> None:
    problem = Problem()
    with pytest.raises(RuntimeError, match='runs precision "bf16" today, not "fp8"'):
        problem.run(precision="fp8")
    with pytest.raises(ValueError, match="x must be aligned to 16 bytes"):
        Problem.run(
            _with(
                problem, x=torch.empty(300 * 256 + 1, device=DEVICE).bfloat16()[1:].view(300, 256)
            )
        )


def _with(problem: Problem, **changed: Tensor) -> Problem:
    for name, value in changed.items():
        setattr(problem, name, value)
    return problem
