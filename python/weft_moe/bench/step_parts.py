"""Where the time of a training step goes: marks in the stream of work, read when it has run.

The stream of a step is cut wherever it enters or leaves a part of the model, forward, recomputed
or backward; the time between two marks belongs to the part that the first one entered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd import Function

# moe: router and experts. attention: with its projections. layer: norms and sums around the two.
# head: embedding, last norm, head and loss. optimizer: clipping and AdamW.
PARTS = ("moe", "attention", "layer", "head", "optimizer")
DECODER_PARTS = ("moe", "attention", "layer")


class PartClock:
    """Notes when the work of a device enters which part."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def enter(self, part: str) -> None:
        """What is queued from here on belongs to `part`; "" is no part."""
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((part, mark))

    def seconds(self) -> dict[str, float]:
        """Time in each of `PARTS` so far. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        total = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if part:
                total[part] += _seconds(start, end)
        return total


def _seconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1e3


class _Mark(Function):
    """Identity on a tensor: going forward the clock enters `after`, going backward `before`."""

    @staticmethod
    def forward(ctx, x: Tensor, clock: PartClock, before: str, after: str) -> Tensor:
        ctx.clock, ctx.before = clock, before
        clock.enter(after)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.enter(ctx.before)
        return dx, None, None, None


@contextlib.contextmanager
def marked(model: nn.Module, clock: PartClock) -> Iterator[None]:
    """Where a Qwen3MoE model's layers tell the clock what they enter and leave."""
    handles = []

    def surround(module: nn.Module, outside: str, inside: str, leaves: bool = True) -> None:
        def before(_, args, kwargs):
            if args:
                return (_Mark.apply(args[0], clock, outside, inside), *args[1:]), kwargs
            x = _Mark.apply(kwargs["hidden_states"], clock, outside, inside)
            return args, {**kwargs, "hidden_states": x}

        def after(_, args, output):
            if isinstance(output, tuple):
                return _Mark.apply(output[0], clock, inside, outside), *output[1:]
            return _Mark.apply(output, clock, inside, outside)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if leaves:
            handles.append(module.register_forward_hook(after))

    for layer in model.model.layers:
        surround(layer, "head", "layer")
        surround(layer.self_attn, "layer", "attention")
        surround(layer.mlp, "layer", "moe")
        # Runs inside a checkpoint, unlike hooks of the layer: the recomputation, which begins in the
        # middle of the experts' backward, enters the layer here, and ends in the experts again.
        surround(layer.input_layernorm, "layer", "layer", leaves=False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
