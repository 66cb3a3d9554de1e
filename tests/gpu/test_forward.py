"""The fused forward on a GPU: against fp64, bit for bit from run to run, under what users do to it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

weft = pytest.importorskip("weft_moe", exc_type=ImportError)
_reason = (
    "no CUDA device is visible"
    if not torch.cuda.is_available()
    else weft.supports(hidden=256, intermediate=128, device="cuda", training=False)
)
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)

DEVICE = torch.device("cuda")


class Problem:
    """Random inputs; `route(scores, top_k)` chooses the indices."""

    def __init__(
        self,
        num_tokens=300,
        hidden=256,
        intermediate=128,
        num_experts=8,
        top_k=2,
        route=None,
        seed=0,
    ):
        g = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*size, std=1.0):
            return torch.randn(size, generator=g, device=DEVICE).mul(std).bfloat16()

        self.num_experts = num_experts
        self.x = normal(num_tokens, hidden)
        self.gate_up = normal(num_experts, 2 * intermediate, hidden, std=hidden**-0.5)
        self.down = normal(num_experts, hidden, intermediate, std=intermediate**-0.5)
        scores = torch.rand(num_tokens, num_experts, generator=g, device=DEVICE)
        self.topk_idx = scores.topk(top_k).indices if route is None else route(scores, top_k)
        self.topk_weights = torch.rand(num_tokens, top_k, generator=g, device=DEVICE) + 0.1

    def run(self, **options) -> Tensor:
        with torch.no_grad():
            return weft.moe(
                self.x, self.topk_idx, self.topk_weights, self.gate_up, self.down,
                num_experts=self.num_experts, **options,
            )  # fmt: skip

    def dense(self, dtype: torch.dtype, clamp_limit: float | None = None) -> Tensor:
        """Each expert's tokens through plain products in `dtype`; bf16 is the unfused layer."""
        x, w1, w2 = (t.to(dtype) for t in (self.x, self.gate_up, self.down))
        y = torch.zeros(self.x.shape, device=DEVICE, dtype=torch.float64)
        for expert in self.topk_idx[self.topk_idx >= 0].unique().tolist():
            token, slot = (self.topk_idx == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ w1[expert].T).chunk(2, dim=-1)
            if clamp_limit is not None:
                gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
            rows = (F.silu(gate) * up) @ w2[expert].T
            weights = self.topk_weights[token, slot, None].double()
            y.index_add_(0, token, rows.double() * weights)
        return y

    def check(self, **options) -> Tensor:
        """Error against fp64 at most twice that of the same layer in unfused bf16 products."""
        y = self.run(**options)
        clamp_limit = options.get("clamp_limit")
        exact = self.dense(torch.float64, clamp_limit)
        allowed = 2 * (self.dense(torch.bfloat16, clamp_limit).bfloat16().double() - exact).norm()
        assert torch.isfinite(y).all()
        assert (y.double() - exact).norm() <= allowed
        return y


def _masked(scores: Tensor, top_k: int) -> Tensor:
    idx = scores.topk(top_k).indices
    idx[scores[:, :top_k] < 0.1] = -1
    idx[:3] = -1
    return idx


def _repeated(scores: Tensor, top_k: int) -> Tensor:
    idx = scores.topk(top_k).indices
    idx[::2, 1] = idx[::2, 0]
    return idx


def _skewed(scores: Tensor, top_k: int) -> Tensor:
    return torch.full_like(scores[:, :top_k], 5, dtype=torch.int64)


ROUTES = {"masked": _masked, "repeated": _repeated, "all_to_one_expert": _skewed}

SHAPES = {
    "small": dict(),
    "one_token": dict(num_tokens=1),
    "one_expert": dict(num_experts=1, top_k=1),
    "top_1": dict(top_k=1),
    "top_16": dict(num_tokens=500, num_experts=64, top_k=16),
    "hidden_64": dict(hidden=64, intermediate=64),
    "intermediate_not_128": dict(intermediate=192),
    "hidden_not_256": dict(hidden=2880, intermediate=2880, num_experts=4, num_tokens=200),
    "experts_60": dict(num_tokens=700, num_experts=60, top_k=6),
    "experts_512": dict(num_tokens=900, num_experts=512, top_k=8),
    "intermediate_1408": dict(
        num_tokens=400, hidden=2048, intermediate=1408, num_experts=16, top_k=6
    ),
    "shape_30b": dict(num_tokens=2048, hidden=2048, intermediate=768, num_experts=128, top_k=8),
}


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
    problem = Problem(num_tokens=300, route=_masked)
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
    problem = Problem(num_tokens=257, route=_masked)
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
    problem, other = Problem(num_tokens=400, seed=1), Problem(num_tokens=400, seed=2, route=_masked)
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
    problem.topk_idx[7, 1] = good
    assert torch.equal(problem.run(), expected)


def test_what_the_backend_cannot_do_is_said_in_words() -> None:
    problem = Problem()
    assert "no backward yet" in weft.supports(hidden=256, intermediate=128, device="cuda")
    problem.x.requires_grad_()
    y = weft.moe(
        problem.x, problem.topk_idx, problem.topk_weights, problem.gate_up, problem.down,
        num_experts=problem.num_experts,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no backward yet"):
        y.sum().backward()
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
