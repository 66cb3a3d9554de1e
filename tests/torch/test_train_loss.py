"""The head in parts against torch's own, and the attention that transformers calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from training import make_config
from weft_moe.train.attention import attention_kernel, causal_attention, fastest_attention
from weft_moe.train.loss import linear_cross_entropy


@pytest.mark.parametrize("chunk_tokens", [4, 10, 100])
def test_loss_and_gradients_are_those_of_all_logits_at_once(chunk_tokens):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((10, 8), (20, 8))
    )
    targets = torch.randint(20, (10,), generator=generator)
    want = F.cross_entropy(hidden @ weight.T, targets)
    got = linear_cross_entropy(hidden, weight, targets, chunk_tokens)
    torch.testing.assert_close(got, want.float())
    for a, b in zip(
        torch.autograd.grad(3 * got, (hidden, weight)),
        torch.autograd.grad(3 * want, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_weight_gradients_of_bf16_are_summed_in_fp32():
    # Every token adds 0.5: a sum in bf16 would stop at 128.
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1024, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, targets, 1).backward()
    torch.testing.assert_close(weight.grad.flatten(), torch.tensor([-0.5, 0.5]).bfloat16())


def test_attention_is_causal_and_shares_key_heads():
    query, key, value = (torch.randn(2, heads, 5, 4) for heads in (4, 2, 2))
    with fastest_attention(deterministic=False):
        y, _ = causal_attention(torch.nn.Identity(), query, key, value, None, scaling=0.5)
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
    mask = torch.full((5, 5), float("-inf")).triu(1)
    want = (query @ key.mT * 0.5 + mask).softmax(-1) @ value
    torch.testing.assert_close(y, want.transpose(1, 2))


@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnn_attention_is_for_runs_that_need_not_repeat(deterministic):
    with fastest_attention(deterministic):
        assert torch.backends.cuda.cudnn_sdp_enabled() is not deterministic
        assert torch.backends.cuda.flash_sdp_enabled()


def test_the_attention_kernel_that_runs_is_named():
    assert attention_kernel(make_config(), torch.device("cpu")) == "flash_attention_for_cpu"
