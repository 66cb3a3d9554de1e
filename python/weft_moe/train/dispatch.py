"""Dispatch backends of the trainer: who carries tokens to their experts and back.

`[trainer.model.moe.dispatch] type` names one of `DISPATCHES`. All have one call,

    y = dispatch(x, topk_idx, topk_weights, gate_up, down)

with x [T, H] in `dispatch.dtype`, topk_idx [T, K] int64 (-1 masks a route),
topk_weights [T, K] fp32, this rank's gate_up [e, 2I, H] (first I rows gate) and down [e, H, I] in
x's dtype; y [T, H] in x's dtype, differentiable in x, topk_weights, gate_up and down. T may differ
by rank and may be 0; every rank of the group must make the call, and its backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_autograd
import torch.nn.functional as F
from torch import Tensor

# Precision -> dtype of the activations and weights that enter a dispatch. Eight-bit formats are
# quantised from bf16 inside it.
ACTIVATION_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp8_bwd": torch.bfloat16,
    "mxfp8": torch.bfloat16,
}


@dataclass(frozen=True)
class MoeLayer:
    """What a dispatch must know of the layers it serves.

    num_experts is E, of all ranks together; precision a key of `ACTIVATION_DTYPES`; process_group
    the ranks that share the experts, None for EP = 1; device where all tensors are; training says
    that a backward will follow; top_k the routes of a token.
    """

    num_experts: int
    hidden: int
    intermediate: int
    precision: str
    process_group: dist.ProcessGroup | None
    device: torch.device
    training: bool = True
    top_k: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return ACTIVATION_DTYPES[self.precision]

    @property
    def ep_size(self) -> int:
        return 1 if self.process_group is None else self.process_group.size()


# grouped_mm wants groups to start, and rows to be, at multiples of this.
_GROUPED_ALIGN_BYTES = 16


class TorchDispatch:
    """The unfused baseline: sort, all-to-all, grouped product, all-to-all, weighted sum."""

    precisions = ("fp32", "bf16")

    def __init__(self, layer: MoeLayer) -> None:
        self.dtype = layer.dtype
        self.num_experts = layer.num_experts
        self.process_group = layer.process_group
        self.ep_size = layer.ep_size
        self.num_local = layer.num_experts // layer.ep_size
        self.is_grouped = self._takes_groups(layer)

    @staticmethod
    def unsupported(layer: MoeLayer, ep_size: int) -> str:
        """Why this dispatch cannot serve a layer, or ""."""
        align = _GROUPED_ALIGN_BYTES // layer.dtype.itemsize
        if TorchDispatch._takes_groups(layer) and (
            layer.hidden % align or layer.intermediate % align
        ):
            return (
                f"hidden = {layer.hidden}, intermediate = {layer.intermediate}: on CUDA in bf16 "
                f"both must be multiples of {align}"
            )
        return ""

    @staticmethod
    def _takes_groups(layer: MoeLayer) -> bool:
        return layer.device.type == "cuda" and layer.dtype == torch.bfloat16

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        num_tokens, top_k = topk_idx.shape
        num_routes = topk_idx.numel()

        # Routes in the order of their expert; masked ones (-1) sort to the front. bounds[i] is
        # the number of routes below expert i - 1.
        experts, order = topk_idx.flatten().sort(stable=True)
        bounds = torch.searchsorted(
            experts, torch.arange(-1, self.num_experts + 1, device=x.device, dtype=experts.dtype)
        )
        received = self._exchange_counts(bounds.diff()[1:])
        # The one wait for the device: slices and all-to-all splits are sizes on the host.
        sizes = torch.cat([bounds, received]).tolist()
        host_bounds, host_received = sizes[: len(bounds)], sizes[len(bounds) :]
        if host_bounds[0] or host_bounds[-1] != num_routes:
            self._refuse_routes(topk_idx)
        order = order[host_bounds[1] :]
        num_local = self.num_local
        send_splits = [end - start for start, end in pairwise(host_bounds[1::num_local])]
        receive_splits = [
            sum(host_received[first : first + num_local])
            for first in range(0, self.num_experts, num_local)
        ]

        rows = self._exchange(x[order // top_k], send_splits, receive_splits)
        rows = self._run_experts(rows, received, host_received, gate_up, down)
        rows = self._exchange(rows, receive_splits, send_splits)

        # A masked route keeps a row of zeros; its weight is never read, whatever it holds.
        by_route = rows.new_zeros(num_routes, x.shape[1]).index_copy(0, order, rows)
        weights = topk_weights.where(topk_idx >= 0, 0.0)
        y = (by_route.view(num_tokens, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(1)
        return y.to(x.dtype)

    def _exchange_counts(self, sent: Tensor) -> Tensor:
        """Routes to each expert [E] -> rows from each source rank to each local expert, [E]."""
        if self.process_group is None:
            return sent
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return received

    def _exchange(self, rows: Tensor, send_splits: list[int], receive_splits: list[int]) -> Tensor:
        if self.process_group is None:
            return rows
        received = rows.new_empty(sum(receive_splits), rows.shape[1])
        return dist_autograd.all_to_all_single(
            received, rows.contiguous(), receive_splits, send_splits, group=self.process_group
        )

    def _run_experts(
        self,
        rows: Tensor,
        received: Tensor,
        host_received: list[int],
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        """Rows [R, H], ordered by source rank and then expert, through their local experts."""
        counts = [sum(host_received[expert :: self.num_local]) for expert in range(self.num_local)]
        # The grouped product asks for aligned groups that are not empty. Added rows are zero, so
        # an expert without rows gets a gradient of exactly 0.
        padded = counts
        if self.is_grouped:
            align = _GROUPED_ALIGN_BYTES // rows.element_size()
            padded = [max(-(-count // align), 1) * align for count in counts]

        # slot[r] is row r's place among the padded groups, sources in rank order in each.
        device, num_rows = rows.device, rows.shape[0]
        local_experts = torch.arange(self.num_local, device=device).repeat(self.ep_size)
        expert = local_experts.repeat_interleave(received, output_size=num_rows)
        by_expert, order = expert.sort(stable=True)
        added = [p - c for p, c in zip(padded, counts, strict=True)]
        shift = torch.tensor([0, *accumulate(added)], device=device)
        slot = torch.empty_like(order)
        slot[order] = torch.arange(num_rows, device=device) + shift[by_expert]

        pool = rows.new_zeros(sum(padded), rows.shape[1]).index_copy(0, slot, rows)
        if self.is_grouped:
            ends = torch.tensor(list(accumulate(padded)), dtype=torch.int32, device=device)
            z = F.grouped_mm(pool, gate_up.transpose(1, 2), offs=ends)
            out = F.grouped_mm(_swiglu(z), down.transpose(1, 2), offs=ends)
        else:
            # unbind, not indexing: its backward is one stack instead of e whole-tensor sums.
            groups = zip(pool.split(counts), gate_up.unbind(), down.unbind(), strict=True)
            out = torch.cat(
                [
                    F.linear(_swiglu(F.linear(g, w_gate_up)), w_down)
                    for g, w_gate_up, w_down in groups
                ]
            )
        return out.index_select(0, slot)

    def _refuse_routes(self, topk_idx: Tensor) -> None:
        wrong = (topk_idx < -1) | (topk_idx >= self.num_experts)
        token, slot = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"topk_idx[{token}, {slot}] = {topk_idx[token, slot].item()}: an expert index is 0 to "
            f"{self.num_experts - 1}, or -1 for a masked route"
        )


class MegaMoeDispatch:
    """Weft's own layer: dispatch, experts and combine in one call of `weft_moe.moe`."""

    precisions = tuple(ACTIVATION_DTYPES)

    def __init__(self, layer: MoeLayer) -> None:
        import weft_moe  # needs the compiled extension, which the other dispatch does without

        self.dtype = layer.dtype
        self._moe = weft_moe.moe
        group = layer.process_group
        self._group = None if group is None else weft_moe.ep_group(group)
        self._num_experts = layer.num_experts
        self._precision = layer.precision

    @staticmethod
    def unsupported(layer: MoeLayer, ep_size: int) -> str:
        """Why this dispatch cannot serve a layer, or ""."""
        import weft_moe

        return weft_moe.supports(
            hidden=layer.hidden,
            intermediate=layer.intermediate,
            precision=layer.precision,
            device=layer.device,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            ep_size=ep_size,
            training=layer.training,
        )

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        return self._moe(
            x,
            topk_idx,
            topk_weights,
            gate_up,
            down,
            group=self._group,
            num_experts=self._num_experts,
            precision=self._precision,
        )


Dispatch = TorchDispatch | MegaMoeDispatch
DISPATCHES: dict[str, type[Dispatch]] = {"mega_moe": MegaMoeDispatch, "torch": TorchDispatch}


def check_dispatch(type: str, precision: str) -> None:
    """Refuse an unknown dispatch type or precision, or a precision that the type cannot do.

    Raises:
        ValueError: names the value, what is allowed, and types that know the precision.
    """
    if type not in DISPATCHES:
        raise ValueError(f"type = {type!r}: choose one of {_listed(DISPATCHES)}")
    if precision not in ACTIVATION_DTYPES:
        raise ValueError(f"precision = {precision!r}: choose one of {_listed(ACTIVATION_DTYPES)}")
    if precision not in DISPATCHES[type].precisions:
        able = [name for name, cls in DISPATCHES.items() if precision in cls.precisions]
        raise ValueError(
            f"precision = {precision!r} with type = {type!r}: that type does "
            f"{_listed(DISPATCHES[type].precisions)}; types that do {precision!r}: {_listed(able)}"
        )


def check_layer(type: str, layer: MoeLayer, ep_size: int) -> None:
    """Refuse a layer that a dispatch cannot serve on `ep_size` ranks; they need not run yet.

    Raises:
        ValueError: as `check_dispatch`; the ranks cannot share the experts evenly; or the dispatch
            cannot run these sizes, or this precision on the device.
        ImportError: the dispatch needs the compiled ops, which were not built.
    """
    check_dispatch(type, layer.precision)
    if layer.num_experts % ep_size:
        raise ValueError(
            f"num_experts = {layer.num_experts} cannot be shared evenly by {ep_size} "
            f"expert-parallel ranks: choose a count that {ep_size} divides"
        )
    if reason := DISPATCHES[type].unsupported(layer, ep_size):
        raise ValueError(f"dispatch type {type!r} cannot run here: {reason}")


def make_dispatch(type: str, layer: MoeLayer) -> Dispatch:
    """The dispatch of one model; its layers share it. Collective over the layer's process group.

    Args:
        type: a key of `DISPATCHES`.
        layer: the layer it serves.

    Raises:
        ValueError, ImportError: as `check_layer`.
    """
    check_layer(type, layer, layer.ep_size)
    return DISPATCHES[type](layer)


def _swiglu(z: Tensor) -> Tensor:
    """silu(gate) * up of z [.., 2I], gate first."""
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
