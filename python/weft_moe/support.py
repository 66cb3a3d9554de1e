"""What this build and machine can run."""

from __future__ import annotations

import torch

from . import library


def supports(
    *,
    hidden: int,
    intermediate: int,
    precision: str = "bf16",
    device: torch.device | str = "cpu",
    num_experts: int | None = None,
    top_k: int = 1,
    ep_size: int = 1,
    training: bool = True,
) -> str:
    """Whether a layer can run here: "" if it can, else the reason and the remedy, in words.

    Args:
        hidden, intermediate: H and I.
        precision: "fp64", "fp32" (CPU only), "bf16", "fp8", "fp8_bwd" or "mxfp8".
        device: "cpu" or "cuda".
        num_experts: E over all ranks. Default: one a rank.
        top_k: K.
        ep_size: ranks that share the experts.
        training: forward and backward; False asks for the forward alone.

    Raises:
        ValueError: the precision or device has no such name.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"weft: device = {kind!r}: choose one of 'cpu', 'cuda'")
    return torch.ops.weft.supports(
        kind == "cpu",
        hidden,
        intermediate,
        ep_size if num_experts is None else num_experts,
        top_k,
        ep_size,
        library.code("precision", precision, library.PRECISIONS),
        128,
        training,
    )
