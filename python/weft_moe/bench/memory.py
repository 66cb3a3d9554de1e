"""What memory a configuration needs, asked of the library: nothing is allocated or run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import library
from ..support import supports
from .layer import SHAPES


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs, whatever the routing; x, y, weights and gradients are not in it.

    workspace_bytes: scratch; one serves all layers. forward_workspace_bytes is the part of it that
    a forward without a backward needs. saved_bytes: what a forward keeps for its backward, in each
    layer. symmetric_bytes: what the other ranks map, data and flags; one serves all layers.
    """

    shape: str
    ep: int
    workspace_bytes: int
    forward_workspace_bytes: int
    saved_bytes: int
    symmetric_bytes: int


def memory_of(
    shape_name: str, *, ep_size: int, num_tokens: int, precision: str, device: torch.device
) -> Memory:
    """The memory of one rank that saves gate and up for its backward.

    Args:
        shape_name: a key of `SHAPES`.
        ep_size: ranks that share the experts.
        num_tokens: the most tokens a rank brings to a call.
        precision: of the layer.
        device: whose backend is asked.

    Raises:
        ValueError: the configuration cannot run here, with the reason.
    """
    shape = SHAPES[shape_name]
    if reason := supports(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        precision=precision,
        device=device,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        ep_size=ep_size,
        training=False,
    ):
        raise ValueError(f"{shape_name} with {ep_size} ranks: {reason}")
    workspace, forward_workspace, saved, data, flags = torch.ops.weft.memory_bytes(
        device.type == "cpu",
        shape.hidden,
        shape.intermediate,
        shape.num_experts,
        shape.top_k,
        ep_size,
        library.PRECISIONS[precision],
        library.SAVES["gate_up"],
        num_tokens,
    )
    return Memory(shape_name, ep_size, workspace, forward_workspace, saved, data + flags)
