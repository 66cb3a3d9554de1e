"""Dispatch backends of the trainer: who carries tokens to their experts and back.

`[trainer.model.moe.dispatch] type` names one of `DISPATCHES`. All but `transformers`, which leaves
the model's own MoE blocks in place, have one call,

    y = dispatch(x, topk_idx, topk_weights, gate_up, down)

with x [T, H] in `dispatch.dtype`, topk_idx [T, K] int64 (-1 masks a route),
topk_weights [T, K] fp32, this rank's gate_up [e, 2I, H] (first I rows gate) and down [e, H, I] in
x's dtype; y [T, H] in x's dtype, differentiable in x, topk_weights, gate_up and down. T may differ
by rank and may be 0; every rank of the group must make the call, and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_autograd
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .fused import fused

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
    that a backward will follow; top_k the routes of a token; save what `weft.moe` keeps for its
    backward, "gate_up", or "inputs" where the layer is checkpointed.
    """

    num_experts: int
    hidden: int
    intermediate: int
    precision: str
    process_group: dist.ProcessGroup | None
    device: torch.device
    training: bool = True
    top_k: int = 1
    save: str = "gate_up"

    @property
    def dtype(self) -> torch.dtype:
        return ACTIVATION_DTYPES[self.precision]

    @property
    def ep_size(self) -> int:
        return 1 if self.process_group is None else self.process_group.size()


# grouped_mm wants rows to be multiples of this.
_GROUPED_ALIGN_BYTES = 16


def _misaligned(layer: MoeLayer) -> str:
    """The sizes of a layer that grouped_mm does not take, and those that it does; or ""."""
    align = _GROUPED_ALIGN_BYTES // layer.dtype.itemsize
    if not (layer.hidden % align or layer.intermediate % align):
        return ""
    return (
        f"hidden = {layer.hidden}, intermediate = {layer.intermediate}: in {layer.precision} both "
        f"must be multiples of {align}"
    )


class TorchDispatch:
    """The unfused baseline, as fast as plain torch makes it: sort, all-to-all, grouped product,
    all-to-all, sum. The router weight enters before the down projection, where rows are narrow."""

    precisions = ("fp32", "bf16")
    keeps_block = False

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
        return _misaligned(layer) if TorchDispatch._takes_groups(layer) else ""

    @staticmethod
    def _takes_groups(layer: MoeLayer) -> bool:
        return layer.device.type == "cuda" and layer.dtype == torch.bfloat16

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        top_k = topk_idx.shape[1]
        num_routes = topk_idx.numel()

        # Routes in the order of their expert; masked ones (-1) sort to the front, wrong ones to
        # both ends. bounds[i] is the number of routes below expert i - 1. A radix sort passes over
        # 16-bit keys a quarter as often as over 64-bit ones.
        key_dtype = torch.int16 if self.num_experts < 2**15 else torch.int32
        keys = topk_idx.flatten().clamp(-2, self.num_experts).to(key_dtype)
        experts, order = keys.sort(stable=True)
        bounds = torch.searchsorted(
            experts,
            torch.arange(-1, self.num_experts + 1, device=x.device, dtype=key_dtype),
            out_int32=True,
        )
        received = self._exchange_counts(bounds.diff()[1:])
        sizes = _to_host(torch.cat([bounds, received]))
        # place[t, k] is the row of a route, -1 of a masked one. The rows are on their way before
        # the host waits, once, for the sizes of slices and all-to-all splits.
        place = torch.empty_like(order)
        place[order] = torch.arange(num_routes, device=x.device)
        is_masked = topk_idx < 0
        place = place.view_as(topk_idx).masked_fill(is_masked, -1)
        rows = _ToRows.apply(x, order // top_k, place)
        sizes = sizes()
        host_bounds, host_received = sizes[: len(bounds)], sizes[len(bounds) :]
        if host_bounds[0] or host_bounds[-1] != num_routes:
            self._refuse_routes(topk_idx)
        if num_masked := host_bounds[1]:
            rows, order = rows[num_masked:], order[num_masked:]
            place = (place - num_masked).masked_fill(is_masked, -1)
        num_local = self.num_local
        send_splits = [end - start for start, end in pairwise(host_bounds[1::num_local])]
        receive_splits = [
            sum(host_received[first : first + num_local])
            for first in range(0, self.num_experts, num_local)
        ]

        # Not indexing, whose backward sorts. The weight of a masked route is never read.
        weights = topk_weights.flatten().index_select(0, order)
        rows = self._exchange(rows, send_splits, receive_splits)
        weights = self._exchange(weights.unsqueeze(1), send_splits, receive_splits).squeeze(1)
        rows = self._run_experts(rows, weights, received, host_received, gate_up, down)
        rows = self._exchange(rows, receive_splits, send_splits)
        return _FromRows.apply(rows, order // top_k, place)

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
        weights: Tensor,
        received: Tensor,
        host_received: list[int],
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        """Rows [R, H], ordered by source rank and then expert, and their router weights [R]
        through their local experts."""
        by_source = received.view(self.ep_size, self.num_local)
        ends = by_source.sum(0).cumsum(0).to(torch.int32)
        counts = [sum(host_received[expert :: self.num_local]) for expert in range(self.num_local)]
        if self.ep_size > 1:
            local_experts = torch.arange(self.num_local, device=rows.device).repeat(self.ep_size)
            expert = local_experts.repeat_interleave(received, output_size=rows.shape[0])
            order = expert.argsort(stable=True)
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order), device=rows.device)
            place = place.unsqueeze(1)
            rows, weights = _ToRows.apply(rows, order, place), weights.index_select(0, order)
        z = self._product(rows, gate_up, counts, ends)
        rows = self._product(_WeightedSwiGlu.apply(z, weights), down, counts, ends)
        return _FromRows.apply(rows, order, place) if self.ep_size > 1 else rows

    def _product(self, rows: Tensor, experts: Tensor, counts: list[int], ends: Tensor) -> Tensor:
        """Rows [R, in], ordered by expert, times their expert's [out, in]."""
        if self.is_grouped and rows.shape[0]:
            return F.grouped_mm(rows, experts.transpose(1, 2), offs=ends)
        # unbind, not indexing: its backward is one stack instead of e whole-tensor sums.
        groups = zip(rows.split(counts), experts.unbind(), strict=True)
        return torch.cat([F.linear(group, expert) for group, expert in groups])

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
    keeps_block = False

    def __init__(self, layer: MoeLayer) -> None:
        import weft_moe  # needs the compiled extension, which the others do without

        self.dtype = layer.dtype
        self._moe = weft_moe.moe
        if layer.process_group is None:
            # Not group=None, whose layers would outlive the model.
            self._group = weft_moe.virtual_ep_group(1, device=layer.device)
        else:
            self._group = weft_moe.ep_group(layer.process_group, device=layer.device)
        self._num_experts = layer.num_experts
        self._precision = layer.precision
        self._save = layer.save

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
            save=self._save,
        )


class TransformersDispatch:
    """transformers' own MoE blocks, router and experts, as its users train them. There is nothing
    to call: the model keeps them. They compute in the model's dtype."""

    precisions = ("fp32", "bf16")
    keeps_block = True

    def __init__(self, layer: MoeLayer) -> None:
        self.dtype = layer.dtype

    @staticmethod
    def unsupported(layer: MoeLayer, ep_size: int) -> str:
        """Why this dispatch cannot serve a layer, or ""."""
        if ep_size > 1:
            return (
                f"ep = {ep_size}: each rank holds all of transformers' experts; choose ep = 1, or "
                "a type that shares experts"
            )
        return _misaligned(layer)


Dispatch = TorchDispatch | MegaMoeDispatch | TransformersDispatch
DISPATCHES: dict[str, type[Dispatch]] = {
    "mega_moe": MegaMoeDispatch,
    "torch": TorchDispatch,
    "transformers": TransformersDispatch,
}


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


def check_dtype(type: str, precision: str, dtype: str) -> None:
    """Refuse a precision that experts left to the model, which computes in `dtype`, would not have.

    Raises:
        ValueError: names both.
    """
    if DISPATCHES[type].keeps_block and precision != dtype:
        raise ValueError(
            f"precision = {precision!r} with type = {type!r} and trainer.dtype = {dtype!r}: that "
            "type's experts compute in the model's dtype; choose the same for both"
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


class _ToRows(Function):
    """x [T, H] -> x[token], a row a route. place [T, K]: the row of a route, or -1 for none.

    Autograd by itself would scatter the gradient, by a sort or by atomics; here each token gathers
    its own.
    """

    @staticmethod
    def forward(ctx, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x[token]

    @staticmethod
    def backward(ctx, drows: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _sum_of_routes(drows, place), None, None


class _FromRows(Function):
    """Rows [R, H] -> the sum of each token's rows [T, H]; the transpose of _ToRows."""

    @staticmethod
    def forward(ctx, rows: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _sum_of_routes(rows, place)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return dy[token], None, None


class _WeightedSwiGlu(Function):
    """weights * silu(gate) * up of z [R, 2I], gate first, rounded once."""

    @staticmethod
    def forward(ctx, z: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(z, weights)
        return fused(_weighted_swiglu, z, weights)

    @staticmethod
    def backward(ctx, da: Tensor) -> tuple[Tensor, Tensor]:
        return fused(_weighted_swiglu_backward, *ctx.saved_tensors, da)


def _sum_of_routes(rows: Tensor, place: Tensor) -> Tensor:
    if not rows.shape[0]:
        return rows.new_zeros(place.shape[0], rows.shape[1])
    return fused(_sum_places, rows, place)


def _sum_places(rows: Tensor, place: Tensor) -> Tensor:
    return rows[place.clamp(min=0)].where((place >= 0).unsqueeze(-1), 0).sum(1)


def _weighted_swiglu(z: Tensor, weights: Tensor) -> Tensor:
    gate, up = _widened(z).chunk(2, dim=-1)
    return (weights.unsqueeze(-1) * F.silu(gate) * up).to(z.dtype)


def _weighted_swiglu_backward(z: Tensor, weights: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = _widened(z).chunk(2, dim=-1)
    da = _widened(da)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dweights = (da * silu * up).sum(-1)
    da = da * weights.unsqueeze(-1)
    dgate = da * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([dgate, da * silu], dim=-1).to(z.dtype), dweights.to(weights.dtype)


def _widened(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _to_host(values: Tensor) -> Callable[[], list[int]]:
    """Queues a copy to the host; the result waits for it, and for nothing queued later."""
    if values.device.type != "cuda":
        return values.tolist
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[int]:
        copied.synchronize()
        return copy.tolist()

    return wait


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
