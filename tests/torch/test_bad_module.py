"""What `weft.MoE` refuses before a call of the layer, in words."""

from __future__ import annotations

import pytest
import torch
import weft_moe as weft


def test_sizes_are_positive():
    for sizes, words in (
        ((0, 64, 4, 2), "hidden = 0: must be at least 1"),
        ((64, -1, 4, 2), "intermediate = -1: must be at least 1"),
        ((64, 64, 0, 2), "num_experts = 0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            weft.MoE(*sizes)


@pytest.mark.parametrize("present", ["gate_up", "down"])
def test_a_module_needs_main_grad_on_both_parameters(present):
    layer = weft.MoE(8, 8, 4, 2, precision="fp32")
    getattr(layer, present).main_grad = torch.zeros_like(getattr(layer, present))
    missing = "down" if present == "gate_up" else "gate_up"
    with pytest.raises(ValueError, match=f"{missing} has no main_grad, {present} has one: set it"):
        layer(torch.randn(3, 8))


def test_a_module_takes_x_of_its_hidden_size():
    layer = weft.MoE(8, 8, 4, 2, precision="fp32")
    for shape in ((3, 16), (2, 3, 4), ()):
        with pytest.raises(ValueError, match=r"x has shape \[.*\], must be \[..., H\] with H = 8"):
            layer(torch.zeros(shape))
    with pytest.raises(TypeError, match="x is a NoneType"):
        layer(None)
