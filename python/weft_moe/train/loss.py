"""The head of a language model and its loss, without the logits of all tokens at once.

A vocabulary of 151,936 makes the logits of 16,384 tokens 9.3 GiB in fp32. Here a part of the tokens
goes through the head at a time, and its gradients are made right behind its loss, so that neither
logits nor a second product through the head are needed in the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from .fused import fused

# Tokens at a time: large enough for a product at full rate and few additions into dweight.
CHUNK_TOKENS = 4096


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Mean cross entropy of softmax(hidden @ weight.T), in nats.

    Args:
        hidden: [T, H], T >= 1.
        weight: [V, H], dtype of hidden.
        targets: [T] int64, 0 to V - 1.
        chunk_tokens: tokens whose logits exist at one time.

    Returns:
        fp32 scalar, differentiable once in hidden and weight. The gradient of weight is summed in
        fp32.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, chunk_tokens)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = zip(*(t.split(chunk_tokens) for t in (hidden, dhidden, targets)), strict=True)
        for h, dh, target in rows:
            losses, dlogits = fused(_cross_entropy, h @ weight.T, target)
            total += losses.sum()
            torch.mm(dlogits, weight, out=dh)
            dweight += dlogits.T @ h
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtype = weight.dtype
        ctx.num_tokens = hidden.shape[0]
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dhidden, dweight = ctx.saved_tensors
        scale = dloss / ctx.num_tokens
        # Rounded once, and never whole in fp32 a second time.
        scaled = torch.empty_like(dweight, dtype=ctx.dtype)
        return dhidden * scale, torch.mul(dweight, scale, out=scaled), None, None


def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, V] and targets [T] -> fp32 losses [T] and their gradients in the logits [T, V]."""
    wide = logits.float()
    log_sum = wide.logsumexp(-1, keepdim=True)
    losses = log_sum - wide.gather(1, targets.unsqueeze(1))
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    dlogits = (wide - log_sum).exp() - is_target.float()
    return losses.squeeze(1), dlogits.to(logits.dtype)
