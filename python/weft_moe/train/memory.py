"""The memory that training needs, worked out before any of it is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .config import Config, ConfigError, ModelSizes
from .loss import CHUNK_TOKENS

_GIB = 2**30
_BYTES = {"fp32": 4, "bf16": 2}
# CUDA's own context, library workspaces, and what an allocator's blocks waste.
_RESERVED = {"cuda": 3 * _GIB, "cpu": 0}


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs, at least.

    state: parameters, gradients and AdamW's two moments. whole: weights gathered or cast for a
    layer and its gradients on their way back into shards. kept: what forwards keep for backwards.
    layer: the largest moment inside one layer's backward. head: the same of the head and loss.
    """

    state: int
    whole: int
    kept: int
    layer: int
    head: int

    @property
    def total(self) -> int:
        return self.state + self.whole + self.kept + max(self.layer, self.head)

    def __str__(self) -> str:
        parts = {
            "parameters, gradients and AdamW": self.state,
            "gathered weights": self.whole,
            "kept activations": self.kept,
            "a layer's backward": self.layer,
            "or the head": self.head,
        }
        listed = [f"{name} {size / _GIB:.1f}" for name, size in parts.items()]
        return f"{', '.join(listed)}: {self.total / _GIB:.1f} GiB"


def layer_parameters(sizes: ModelSizes) -> tuple[int, int]:
    """Parameters of one layer: of all its experts, and of the rest."""
    experts = sizes.num_experts * 3 * sizes.hidden * sizes.intermediate
    heads = 2 * sizes.num_heads + 2 * sizes.num_kv_heads
    attention = heads * sizes.head_dim * sizes.hidden + 2 * sizes.head_dim
    return experts, attention + sizes.num_experts * sizes.hidden + 2 * sizes.hidden


def head_parameters(sizes: ModelSizes) -> int:
    """Parameters outside the layers: embedding, last norm and head."""
    return (2 * sizes.vocab_size + 1) * sizes.hidden


def estimate(config: Config, num_ranks: int, num_layers: int | None = None) -> Memory:
    """The memory of a rank, with `num_layers` in place of the configuration's own."""
    trainer, sizes = config.trainer, config.trainer.model.sizes
    layers = sizes.num_layers if num_layers is None else num_layers
    tokens = config.data.batch_size * config.data.sequence_length // num_ranks
    width = _BYTES[trainer.dtype]
    experts, rest = layer_parameters(sizes)
    head = head_parameters(sizes)
    local_experts = experts // trainer.ep

    # Four of each parameter: itself, its gradient and two moments. The ranks of a copy share them.
    of_copy = 4 * _BYTES[trainer.param_dtype] * (layers * (experts + rest) + head)
    state = of_copy * trainer.dp_replicate // num_ranks
    is_sharded = num_ranks > 1 or trainer.param_dtype != trainer.dtype
    # A layer's weights with those gathered ahead, its gradients and their sums in fp32; and the
    # head's weights, which stay.
    whole = (3 * width + 4) * (local_experts + rest) + 2 * width * head if is_sharded else 0

    # Rows of the experts in the backward, two bytes an element: x, dy and dx; z [2I], the activation
    # [I], and their gradients.
    rows = tokens * sizes.top_k
    inside_experts = 2 * rows * (3 * sizes.hidden + 6 * sizes.intermediate)
    # Queries, keys and values with their gradients and rotated copies, beside the normed inputs.
    qkv = sizes.head_dim * (sizes.num_heads + 2 * sizes.num_kv_heads)
    inside_attention = width * tokens * (3 * qkv + 4 * sizes.hidden)
    kept = width * tokens * sizes.hidden * (layers + 1)
    if not trainer.checkpoint_activations:
        kept += layers * (inside_attention + 4 * rows * sizes.intermediate)

    chunk = min(tokens, CHUNK_TOKENS)
    of_head = sizes.vocab_size * (chunk * 2 * width + sizes.hidden * (4 + 2 * width))
    return Memory(state, whole, kept, inside_experts + inside_attention, of_head)


def check_memory(config: Config, num_ranks: int, num_local_ranks: int) -> None:
    """Refuse a model that is too large for this machine.

    Args:
        config: what would be trained.
        num_ranks: ranks that train it.
        num_local_ranks: those of them on this machine, which on the CPU share its memory.

    Raises:
        ConfigError: with the arithmetic, and the most layers that fit.
    """
    device = config.trainer.device_type
    if device == "cuda":
        available = torch.cuda.get_device_properties(0).total_memory
    else:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        available = pages * page_bytes // num_local_ranks
    available -= _RESERVED[device]
    needed = estimate(config, num_ranks)
    if needed.total <= available:
        return
    asked = layers = config.trainer.model.sizes.num_layers
    while layers and estimate(config, num_ranks, layers).total > available:
        layers -= 1
    remedies = [
        f"lower trainer.model.num_layers to at most {layers}"
        if layers
        else "choose a smaller model or shorter sequences"
    ]
    if config.trainer.param_dtype == "fp32" and config.trainer.dtype == "bf16":
        remedies.append("choose param_dtype = 'bf16'")
    raise ConfigError(
        f"[trainer.model] num_layers = {asked} does not fit: a rank of {num_ranks} needs, in GiB, "
        f"{needed}; it has {available / _GIB:.1f} GiB. To train it, {', '.join(remedies)} or start "
        "more ranks"
    )
