"""torch.compile of blocks that hold the layer: one graph, the same numbers, few recompilations."""

from __future__ import annotations

import pytest
import torch
import weft_moe as weft
from torch import nn


class Block(nn.Module):
    """What surrounds the layer in a transformer."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.moe = weft.MoE(16, 24, 6, 2, precision="fp32", **options)

    def forward(self, x):
        return x + self.moe(self.norm(x))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch.compiler.reset()


def gradients(block, call, num_tokens):
    block.zero_grad()
    x = torch.linspace(-2, 2, num_tokens * 16).view(num_tokens, 16).requires_grad_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_inductor_makes_one_graph_of_a_block():
    block = Block()
    compiled = torch.compile(block, fullgraph=True)
    assert_same(gradients(block, compiled, 40), gradients(block, block, 40))


@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_token_counts_below_max_tokens_share_one_graph(save):
    block = Block(save=save, group=weft.virtual_ep_group(1, max_tokens=512))
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    gradients(block, compiled, 40)
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_tokens in (7, 512):
            assert_same(gradients(block, compiled, num_tokens), gradients(block, block, num_tokens))


def test_local_groups_without_max_tokens_compile_again_for_more_rows_only():
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    gradients(block, compiled, 40)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(gradients(block, compiled, 128), gradients(block, block, 128))
        with pytest.raises(RuntimeError, match="recompile"):
            gradients(block, compiled, 129)
    assert_same(gradients(block, compiled, 129), gradients(block, block, 129))


def test_main_grad_in_a_graph():
    block = Block()
    expected = gradients(block, block, 40)
    block.moe.gate_up.main_grad = torch.ones_like(block.moe.gate_up)
    block.moe.down.main_grad = torch.ones_like(block.moe.down)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        gradients(block, compiled, 40)
    named = dict(zip(["y", "x", *dict(block.named_parameters())], expected, strict=True))
    for name in ("gate_up", "down"):
        weight = getattr(block.moe, name)
        assert weight.grad is None
        torch.testing.assert_close(
            weight.main_grad - 1, 2 * named[f"moe.{name}"], rtol=1e-4, atol=1e-5
        )


def test_inference_in_a_graph():
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x))
