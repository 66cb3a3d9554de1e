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
        device: "cpu" or "cuda", or one of several GPUs, such as "cuda:1".
        num_experts: E over all ranks. Default: one a rank.
        top_k: K.
        ep_size: ranks that share the experts.
        training: forward and backward; False asks for the forward alone.

    Raises:
        ValueError: the precision or device has no such name.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"weft: device = {device.type!r}: choose one of 'cpu', 'cuda'")
    precision_code = library.code("precision", precision, library.PRECISIONS)

    def of_current_device() -> str:
        return torch.ops.weft.supports(
            device.type == "cpu",
            hidden,
            intermediate,
            ep_size if num_experts is None else num_experts,
            top_k,
            ep_size,
            precision_code,
            128,
            training,
        )

    if device.type == "cpu" or device.index is None:
        return of_current_device()
    if device.index >= torch.cuda.device_count():
        return (
            f"device = {str(device)!r}: torch sees {torch.cuda.device_count()} CUDA devices, counted "
            "from 0; choose one of those, or 'cpu'"
        )
    with torch.cuda.device(device):
        return of_current_device()
