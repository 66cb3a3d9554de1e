"""A layer on the GPU with its inputs, and what it should give: dense, one expert at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import weft_moe as weft
from torch import Tensor
from torch.autograd import Function

DEVICE = torch.device("cuda")
GRADIENTS = ("dx", "dtopk_weights", "dgate_up", "ddown")
SAVES = ("gate_up", "inputs")
SEVERAL_TILES = dict(num_tokens=1500, hidden=512, intermediate=256, num_experts=16, top_k=4)


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
        self.dy = normal(num_tokens, hidden)

    @property
    def differentiable(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order of GRADIENTS."""
        return self.x, self.topk_weights, self.gate_up, self.down

    def leaves(self, wanted: tuple[str, ...] = GRADIENTS) -> list[Tensor]:
        """Those inputs anew, of which the wanted get gradients."""
        return [
            t.detach().clone().requires_grad_(name in wanted)
            for name, t in zip(GRADIENTS, self.differentiable, strict=True)
        ]

    def forward(self, leaves: list[Tensor] | None = None, **options) -> Tensor:
        x, topk_weights, gate_up, down = self.differentiable if leaves is None else leaves
        return weft.moe(
            x, self.topk_idx, topk_weights, gate_up, down, num_experts=self.num_experts, **options
        )

    def run(self, **options) -> Tensor:
        with torch.no_grad():
            return self.forward(**options)

    def gradients(self, wanted: tuple[str, ...] = GRADIENTS, **options) -> dict[str, Tensor]:
        """The wanted gradients by Weft; those of the experts in `grad_dtype` where it is given."""
        leaves = self.leaves(wanted)
        if "grad_dtype" in options:
            leaves[2].grad_dtype = leaves[3].grad_dtype = options["grad_dtype"]
        self.forward(leaves, **options).backward(self.dy)
        return {
            name: leaf.grad
            for name, leaf in zip(GRADIENTS, leaves, strict=True)
            if leaf.grad is not None
        }

    def dense(self, dtype: torch.dtype, clamp_limit: float | None = None) -> Tensor:
        """y with products in `dtype`; bf16 is the unfused layer."""
        return self._dense(dtype, clamp_limit, [t.double() for t in self.differentiable])

    def dense_gradients(
        self, dtype: torch.dtype, clamp_limit: float | None = None
    ) -> dict[str, Tensor]:
        """All gradients, with products in `dtype`; only what enters a product is rounded."""
        leaves = [t.double().requires_grad_() for t in self.differentiable]
        y = self._dense(dtype, clamp_limit, leaves)
        if not y.requires_grad:  # all routes are masked
            return dict(zip(GRADIENTS, (torch.zeros_like(t) for t in leaves), strict=True))
        grads = torch.autograd.grad(y, leaves, self.dy.double(), materialize_grads=True)
        return dict(zip(GRADIENTS, grads, strict=True))

    def _dense(self, dtype: torch.dtype, clamp_limit: float | None, leaves: list[Tensor]) -> Tensor:
        x, topk_weights, gate_up, down = leaves
        y = torch.zeros(x.shape, device=DEVICE, dtype=torch.float64)
        experts = zip(gate_up.unbind(), down.unbind(), strict=True)
        for expert, (w1, w2) in enumerate(experts):
            token, slot = (self.topk_idx == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            gate, up = _Product.apply(x[token].to(dtype), w1).chunk(2, dim=-1)
            if clamp_limit is not None:
                gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
            rows = _Product.apply(F.silu(gate) * up, w2)
            y = y.index_add(0, token, rows.double() * topk_weights[token, slot, None])
        return y

    def check(self, **options) -> Tensor:
        """Error of y against fp64 at most twice that of the same layer in unfused bf16 products."""
        y = self.run(**options)
        clamp_limit = options.get("clamp_limit")
        exact = self.dense(torch.float64, clamp_limit)
        allowed = 2 * (self.dense(torch.bfloat16, clamp_limit).bfloat16().double() - exact).norm()
        assert torch.isfinite(y).all()
        assert (y.double() - exact).norm() <= allowed
        return y

    def check_gradients(self, **options) -> dict[str, Tensor]:
        """The same of each gradient, whose dtype the unfused layer's is rounded to."""
        grads = self.gradients(**options)
        self.assert_close(grads, options.get("clamp_limit"))
        return grads

    def assert_close(self, grads: dict[str, Tensor], clamp_limit: float | None = None) -> None:
        exact = self.dense_gradients(torch.float64, clamp_limit)
        unfused = self.dense_gradients(torch.bfloat16, clamp_limit)
        for name, grad in grads.items():
            assert torch.isfinite(grad).all(), name
            # A handful of errors may cancel by chance.
            factor = 2 if grad.numel() >= 64 else 4
            allowed = factor * (unfused[name].to(grad.dtype).double() - exact[name]).norm()
            error = (grad.double() - exact[name]).norm()
            assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


class _Product(Function):
    """rows @ weight.T in the dtype of rows; the gradient of the fp64 weight is not rounded."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows @ weight.to(rows.dtype).T

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return dout @ weight.to(dout.dtype), dout.double().T @ rows.double()


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor], what="") -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), f"{name} differs {what}"


def masked(scores: Tensor, top_k: int) -> Tensor:
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


ROUTES = {"masked": masked, "repeated": _repeated, "all_to_one_expert": _skewed}

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
