"""`weft.check` asks for what a GPU has found; on the CPU, where calls raise by themselves, nothing."""

from __future__ import annotations

import pytest
import torch
import weft_moe as weft


@pytest.mark.parametrize("ep_size", [1, 2])
def test_on_the_cpu_it_finds_nothing(ep_size):
    group = weft.virtual_ep_group(ep_size)
    assert weft.check(group) is None  # without a layer yet
    layer = weft.MoE(8, 8, 4, 2, precision="fp32", group=group)
    layer([torch.randn(3, 8)] * ep_size)
    assert weft.check(group) is None
    assert weft.check() is None


def test_after_a_call_that_raised_by_itself():
    group = weft.virtual_ep_group(1)
    idx = torch.full((3, 1), 7)
    with pytest.raises(ValueError, match="slot 0 is 7"):
        weft.moe(
            torch.zeros(3, 8), idx, torch.ones(3, 1), torch.zeros(2, 8, 8), torch.zeros(2, 8, 4),
            group=group, num_experts=2, precision="fp32",
        )  # fmt: skip
    weft.check()
