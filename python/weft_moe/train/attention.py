"""Causal attention through torch's scaled_dot_product_attention, with the fastest kernel first."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from .config import Config

# The name under which transformers finds it, for `attn_implementation`. As transformers knows no
# mask for this name, it makes none: sequences are packed without padding.
IMPLEMENTATION = "weft_causal_sdpa"

# Fastest first on a Hopper GPU. torch passes over those that a machine, dtype or size rules out.
_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_OP_PREFIX = "_scaled_dot_product_"


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """query [B, heads, S, D], key and value [B, kv heads, S, D] -> [B, S, heads, D], as transformers
    calls it."""
    y = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, causal_attention)


def fastest_attention(deterministic: bool) -> AbstractContextManager[None]:
    """Where attention takes the fastest kernel; with `deterministic` cuDNN's is passed over, whose
    backward adds in no fixed order."""
    priority = [b for b in _PRIORITY if not (deterministic and b is SDPBackend.CUDNN_ATTENTION)]
    return sdpa_kernel(priority, set_priority=True)


class _SeenOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


def attention_kernel(config: Config, device: torch.device) -> str:
    """The kernel that attention of a configuration runs, by the name of torch's op, such as
    "cudnn_attention": found by running it on one sequence."""
    trainer = config.trainer
    sizes = trainer.model.sizes
    dtype = torch.bfloat16 if trainer.dtype == "bf16" else torch.float32
    query, key, value = (
        torch.zeros(
            (1, heads, config.data.sequence_length, sizes.head_dim),
            dtype=dtype,
            device=device,
            requires_grad=True,  # a kernel without a backward would not do
        )
        for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    )
    with fastest_attention(trainer.deterministic), _SeenOps() as seen:
        causal_attention(nn.Identity(), query, key, value, None, scaling=sizes.head_dim**-0.5)
    names = [name for name in seen.names if name.startswith(_OP_PREFIX)]
    return names[0].removeprefix(_OP_PREFIX) if names else "math"
