"""The machine under the GPU tests: torch sees the device, and its products are right."""

import problem as layers
import pytest
import torch
from weft_moe.train.dispatch import MoeLayer, make_dispatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")


def test_device_is_hopper_or_newer() -> None:
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(f"{name}, compute capability {capability[0]}.{capability[1]}")
    assert capability >= (9, 0), (
        f"{name} has compute capability {capability}; Weft's kernels need 9.0"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_agrees_with_fp64(dtype: torch.dtype) -> None:
    """Exact products of the rounded inputs, but for fp32 accumulation and one final rounding."""
    torch.manual_seed(0)
    a, b = (torch.randn(512, 512, device="cuda", dtype=dtype) for _ in range(2))
    exact = a.double() @ b.double()
    # Half a unit in the last place of the result, and fp32 sums of 512 terms.
    accumulated = 512 * 2.0**-24 * (a.double().abs() @ b.double().abs())
    allowed = exact.abs() * torch.finfo(dtype).eps / 2 + accumulated
    error = ((a @ b).double() - exact).abs()
    assert (error <= allowed).all(), (
        f"error is {(error / allowed).max().item():.2f} times the allowed"
    )


def test_unfused_layer_agrees_with_fp64() -> None:
    """The baseline of the benchmarks computes the layer: each token against plain products."""
    from weft_moe.bench.layer import Problem, Shape, dispatch_for

    shape = Shape(hidden=256, intermediate=128, num_experts=8, top_k=2)
    problem = Problem(shape, 300, "bf16", torch.device("cuda"))
    y = dispatch_for("unfused", problem)(*problem.inputs)
    x, idx, weights, gate_up, down = (tensor.detach() for tensor in problem.inputs)
    z = torch.einsum("th,tknh->tkn", x.double(), gate_up.double()[idx])
    gate, up = z.chunk(2, dim=-1)
    a = torch.nn.functional.silu(gate) * up * weights.double().unsqueeze(-1)
    exact = torch.einsum("tki,tkhi->th", a, down.double()[idx])
    # bf16 roundings of z, a', the expert's row and y: a few units of 2^-9 in the norm.
    error = (y.double() - exact).norm() / exact.norm()
    assert error < 4 * 2.0**-9, f"relative error {error.item():.2e}"


@pytest.mark.parametrize("route", [None, layers.masked])
def test_gradients_of_the_unfused_layer_agree_with_fp64_and_repeat(route) -> None:
    problem = layers.Problem(num_tokens=700, route=route)
    layer = MoeLayer(problem.num_experts, 256, 128, "bf16", None, torch.device("cuda"))
    dispatch = make_dispatch("torch", layer)

    def gradients() -> dict[str, torch.Tensor]:
        x, topk_weights, gate_up, down = leaves = problem.leaves()
        dispatch(x, problem.topk_idx, topk_weights, gate_up, down).backward(problem.dy)
        return dict(zip(layers.GRADIENTS, (leaf.grad for leaf in leaves), strict=True))

    grads = gradients()
    problem.assert_close(grads)
    layers.assert_same_bits(gradients(), grads)
