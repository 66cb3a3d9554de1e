"""`weft.moe`: one expert-parallel mixture-of-experts layer, differentiable and traceable.

The ops `torch.ops.weft.forward` and `.backward` are compiled (bindings/torch). Here are their fake
kernels, which give shapes without running anything, and their autograd. All tensors of the ops come
as lists with one entry a rank, since a virtual group runs several ranks in one call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import library
from .group import LOCAL, Group, _groups, group_of

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def moe(
    x: Tensor | Sequence[Tensor],
    topk_idx: Tensor | Sequence[Tensor],
    topk_weights: Tensor | Sequence[Tensor],
    gate_up: Tensor | Sequence[Tensor],
    down: Tensor | Sequence[Tensor],
    *,
    group: Group | None = None,
    num_experts: int,
    precision: str = "bf16",
    activation: str = "swiglu",
    clamp_limit: float | None = None,
    save: str = "gate_up",
    grad_dtype: torch.dtype | None = None,
    main_grad: tuple[Tensor | Sequence[Tensor], Tensor | Sequence[Tensor]] | None = None,
    num_sms: int = 0,
    deadline_s: float | None = None,
) -> Tensor | list[Tensor]:
    """Routes tokens to experts across the group, runs the experts, and sums up a token's routes::

        y[t] = sum over k of  down[e] @ (topk_weights[t, k] * silu(g) * u)

    with e = topk_idx[t, k] and [g; u] = gate_up[e] @ x[t]. Differentiable once in x, topk_weights,
    gate_up and down. Collective: all ranks of the group make the call, and its backward, in the
    same order. With a virtual group every tensor is a list with one entry a rank, and so is y.

    T tokens of this rank (may differ by rank and may be 0), H hidden, I intermediate, K top-k, E
    experts, e = E / EP size local experts; rank r holds experts r * e to (r + 1) * e - 1.

    On CUDA all of it runs in the current stream; calls of a group on several streams must wait for
    one another. What the device finds wrong is raised by the next call, or by `check`.

    Args:
        x: [T, H] bf16; fp32 or fp64 in the precisions of that name. All tensors are contiguous.
        topk_idx: [T, K] int32 or int64; -1 masks a route.
        topk_weights: [T, K] fp32.
        gate_up: [e, 2I, H], dtype of x; the first I rows are the gate.
        down: [e, H, I], dtype of x.
        group: from `ep_group` or `virtual_ep_group`; None is this process alone (EP = 1).
        num_experts: E.
        precision: "bf16", "fp8", "fp8_bwd", "mxfp8", and on the CPU "fp32" and "fp64".
        activation: "swiglu", silu(g) * u.
        clamp_limit: g is cut to at most this and u to [-this, this] before the activation.
        save: "gate_up" keeps [g; u] of every row for the backward; "inputs" keeps the arguments
            alone and computes it again, and then `torch.utils.checkpoint` does not run the layer a
            second time.
        grad_dtype: of the gradients of gate_up and down: their own dtype (None) or fp32. Autograd
            casts a gradient to its tensor's dtype unless `tensor.grad_dtype` allows another.
        main_grad: (buffer for gate_up, buffer for down), fp32 (fp64 in that precision), of the
            weights' shapes. The backward adds the weight gradients into them in place, and
            gate_up.grad and down.grad stay None.
        num_sms: GPU: SMs to use; CPU: worker threads. 0 is the default: of a GPU all, or an even
            share where ranks of the group share it.
        deadline_s: longest wait for another rank, in seconds. Default: the group's.

    Returns:
        y, with shape and dtype of x.

    Raises:
        ValueError: an argument is wrong; the words say which, what it is and what is allowed.
        TypeError: a tensor or a list of tensors is needed where something else was given.
        MemoryError: with the bytes that were asked for.
        RuntimeError: the device cannot do this; another rank refused the call (its words are
            repeated); or a rank did not come within the deadline (the words name it).
    """
    group = LOCAL if group is None else group
    deadline_s = group.deadline_s if deadline_s is None else deadline_s
    single = isinstance(x, Tensor)
    try:
        if activation != "swiglu":
            raise ValueError(f"weft: activation = {activation!r}: choose 'swiglu'")
        if clamp_limit is not None and not clamp_limit > 0:
            raise ValueError(
                f"weft: clamp_limit = {clamp_limit}: a limit is above 0, None is no limit"
            )
        save_code = library.code("save", save, library.SAVES)
        precision_code = library.code("precision", precision, library.PRECISIONS)
        x = tensor_list("x", x, single)
        topk_idx = tensor_list("topk_idx", topk_idx, single)
        topk_weights = tensor_list("topk_weights", topk_weights, single)
        gate_up = tensor_list("gate_up", gate_up, single)
        down = tensor_list("down", down, single)
        main_grad_gate_up, main_grad_down = _main_grad_lists(main_grad, single, len(x))
        topk_idx = [_narrow(idx, group, r, num_experts) for r, idx in enumerate(topk_idx)]
        differentiable = (*x, *topk_weights, *gate_up, *down)
        _refuse_tangents(differentiable)
    except Exception as error:
        refuse(group, error, deadline_s)
        raise
    training = torch.is_grad_enabled() and any(t.requires_grad for t in differentiable)
    if not training:
        save_code = library.SAVES["inputs"]
    inputs = (x, topk_idx, topk_weights, gate_up, down, main_grad_gate_up, main_grad_down)
    if group.agrees_on_tokens and not torch.compiler.is_compiling():
        # What is wrong here is said before any rank is met, and enters no max_tokens.
        torch.ops.weft.check_inputs(
            *inputs,
            group.id,
            num_experts,
            precision_code,
            save_code,
            clamp_limit or 0.0,
            num_sms,
            deadline_s,
        )
    config = (
        group.id,
        num_experts,
        precision_code,
        save_code,
        group.tokens_for(x, deadline_s),
        clamp_limit or 0.0,
        num_sms,
        deadline_s,
        library.data_dtype(precision) if grad_dtype is None else grad_dtype,
    )
    if training and save_code == library.SAVES["inputs"] and not torch.compiler.is_compiling():
        y = _forward_of_held_inputs(inputs, config)
    else:
        y, _, _ = torch.ops.weft.forward(*inputs, *config)
    return y[0] if single else y


def check(group: Group | None = None) -> None:
    """Raises what a GPU has found wrong in calls that have run so far, such as an index out of
    range or a stall, which the next call of the layer would raise too: one fault a call of this
    function, each fault once. Does not wait for the device: synchronise first to ask about all
    calls made. On the CPU every call raises by itself, and this does nothing.

    Args:
        group: whose layers to ask; None is every group of this process.

    Raises:
        ValueError: a router index was out of range; it was taken as masked.
        RuntimeError: another rank did not come within the deadline; the words name it.
    """
    for each in tuple(_groups.values()) if group is None else (group,):
        torch.ops.weft.check_layers(each.id)


def refuse(group: Group, error: Exception, deadline_s: float) -> None:
    """Tells the other ranks of a group, which wait for this one, why it does not make a call."""
    if torch.compiler.is_compiling():
        return
    with contextlib.suppress(RuntimeError):  # they are gone: `error` is still the thing to say
        torch.ops.weft.refuse(group.id, str(error), deadline_s)


def _narrow(topk_idx: Tensor, group: Group, rank: int, num_experts: int) -> Tensor:
    """int64 indices as int32, which the kernel takes; one beyond its range stays out of range."""
    if topk_idx.dtype != torch.int64:
        return topk_idx
    narrow = _as_int32(topk_idx)
    # Words with the true value, where they cost no wait for a device.
    if topk_idx.device.type == "cpu" and topk_idx.dim() == 2 and not torch.compiler.is_compiling():
        lost = (narrow != topk_idx).nonzero()
        if len(lost):
            token, slot = lost[0].tolist()
            raise ValueError(
                f"weft: topk_idx of rank {group.ranks[rank]} at token {token}, slot {slot} is "
                f"{topk_idx[token, slot].item()}; allowed: 0 to {num_experts - 1}, or -1 for a "
                "masked route"
            )
    return narrow


def _as_int32(idx: Tensor) -> Tensor:
    """Cut to the range of int32: by one kernel where it can be, which has its bounds in tensors, as
    torch.clamp casts its result only then."""
    # Compiled it is one kernel anyway, and a tensor subclass, such as a fake one, has no bounds.
    plain = type(idx) is Tensor and not torch.compiler.is_compiling()
    bounds = _int32_bounds(idx.device) if plain else None
    if bounds is None:
        return idx.clamp(INT32_MIN, INT32_MAX).to(torch.int32)
    return torch.clamp(idx, *bounds, out=torch.empty_like(idx, dtype=torch.int32))


_bounds: dict[torch.device, tuple[Tensor, ...]] = {}


def _int32_bounds(device: torch.device) -> tuple[Tensor, ...] | None:
    """The least and the largest int32 as int64 on a device; None, without an earlier call, where
    none can be made that outlives this one: in a graph capture, or where a mode makes fakes."""
    if device not in _bounds:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        # From the host, which waits for the copy: any stream may use them.
        bounds = torch.tensor([INT32_MIN, INT32_MAX], device=device).unbind()
        if any(type(bound) is not Tensor for bound in bounds):
            return None
        _bounds[device] = bounds
    return _bounds[device]


def tensor_list(name: str, value: object, single: bool) -> list[Tensor]:
    """A tensor argument as a list with one entry a rank; `single` says that x is one tensor.

    Raises:
        TypeError: it is no tensor, or no list of tensors where x is none.
        ValueError: the list is empty.
    """
    if single:
        if not isinstance(value, Tensor):
            raise TypeError(f"weft: {name} is a {type(value).__name__}: must be a tensor, as x is")
        return [value]
    if not isinstance(value, list | tuple):
        raise TypeError(
            f"weft: {name} is a {type(value).__name__}: must be a list of tensors, one a rank; or "
            "pass a single tensor for every argument"
        )
    if not value:
        raise ValueError(f"weft: {name} is an empty list: pass one tensor a rank of the group")
    for rank, tensor in enumerate(value):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"weft: {name}[{rank}] is a {type(tensor).__name__}: must be a tensor")
    return list(value)


def _main_grad_lists(
    main_grad: Sequence | None, single: bool, num_ranks: int
) -> tuple[list[Tensor], list[Tensor]]:
    if main_grad is None:
        return [], []
    if not isinstance(main_grad, list | tuple) or len(main_grad) != 2:
        count = f" of {len(main_grad)}" if isinstance(main_grad, list | tuple) else ""
        raise ValueError(
            f"weft: main_grad is a {type(main_grad).__name__}{count}: must be a pair, (buffer for "
            "gate_up, buffer for down)"
        )
    for i, weight in enumerate(("gate_up", "down")):
        if main_grad[i] is None:
            raise ValueError(
                f"weft: main_grad[{i}], the buffer for {weight}, is None: pass both, or "
                "main_grad=None for gradients in gate_up.grad and down.grad"
            )
    lists = tuple(tensor_list(f"main_grad[{i}]", main_grad[i], single) for i in range(2))
    for i, buffers in enumerate(lists):
        if len(buffers) != num_ranks:
            raise ValueError(
                f"weft: main_grad[{i}] has {len(buffers)} tensors, x has {num_ranks}: pass one a "
                "rank"
            )
    return lists


def _refuse_tangents(tensors: Sequence[Tensor]) -> None:
    if torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            "weft: moe has no forward-mode derivative, and an argument is a dual tensor: use "
            "reverse mode (backward)"
        )


@torch.library.register_fake("weft::forward")
def _forward_fake(
    x, topk_idx, topk_weights, gate_up, down, main_grad_gate_up, main_grad_down, *config
):
    for t in (*topk_idx, *topk_weights, *gate_up, *down, *main_grad_gate_up, *main_grad_down):
        if t.device != x[0].device:
            raise ValueError(
                f"weft: a tensor of shape {tuple(t.shape)} is on {t.device}, x is on "
                f"{x[0].device}: all tensors of a call must be on one device"
            )
    group, num_experts, precision, save, max_tokens, clamp_limit, *_ = config
    saved = []
    if save == library.SAVES["gate_up"]:
        saved_bytes = torch.ops.weft.saved_bytes(
            group,
            x[0].device.type == "cpu",
            int(x[0].shape[1]),
            int(down[0].shape[2]),
            num_experts,
            int(topk_idx[0].shape[1]),
            precision,
            save,
            int(max_tokens),
            clamp_limit,
        )
        saved = [t.new_empty(saved_bytes, dtype=torch.uint8) for t in x]
    generation = torch.empty(len(saved), dtype=torch.int64, device="cpu")
    return [torch.empty_like(t) for t in x], saved, generation


@torch.library.register_fake("weft::backward")
def _backward_fake(*args):
    return None  # writes into tensors that it is given


def _gradients(dy, inputs, saved, generation, main_grad, options, grad_dtype, needs):
    """Gradients of x, topk_idx, topk_weights, gate_up and down: lists with one entry a rank, of
    None where `needs` (a bool for each of the differentiable four) says no or main_grad took it."""
    if torch.is_grad_enabled():
        error = RuntimeError("weft: moe is differentiable once, not twice (create_graph=True)")
        refuse(group_of(options[0]), error, options[-1])
        raise error
    x, _, topk_weights, gate_up, down = inputs

    def empty_like(tensors, needed, dtype=None):
        return [torch.empty_like(t, dtype=dtype) for t in tensors] if needed else []

    accumulate = len(main_grad[0]) > 0
    dx, dtopk_weights = empty_like(x, needs[0]), empty_like(topk_weights, needs[1])
    if accumulate:
        dgate_up, ddown = (
            buffers if needed else [] for buffers, needed in zip(main_grad, needs[2:], strict=True)
        )
    else:
        dgate_up = empty_like(gate_up, needs[2], grad_dtype)
        ddown = empty_like(down, needs[3], grad_dtype)
    torch.ops.weft.backward(
        [
            torch.zeros_like(t) if grad is None else grad.contiguous()
            for grad, t in zip(dy, x, strict=True)
        ],
        *inputs,
        saved,
        generation,
        dx,
        dtopk_weights,
        dgate_up,
        ddown,
        accumulate,
        *options,
    )
    if accumulate:
        dgate_up, ddown = [], []
    none = [None] * len(dy)
    return dx or none, none, dtopk_weights or none, dgate_up or none, ddown or none


def _by_rank(flat: Sequence[Tensor], num_ranks: int) -> list[list[Tensor]]:
    return [list(flat[i : i + num_ranks]) for i in range(0, len(flat), num_ranks)]


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # `saved` is large, and would get a gradient of zeros
    *ctx.options, ctx.grad_dtype = inputs[7:]
    ctx.group = group_of(ctx.options[0])  # the number alone would not keep it alive
    ctx.num_ranks = len(inputs[0])
    # Not through save_for_backward: other micro-batches write to main_grad in between, rightly.
    ctx.main_grad = inputs[5:7]
    _, saved, generation = output
    ctx.save_for_backward(*itertools.chain(*inputs[:5], saved), generation)


def _backward(ctx, dy, _saved, _generation):
    *flat, generation = ctx.saved_tensors
    x, topk_idx, topk_weights, gate_up, down, *saved = _by_rank(flat, ctx.num_ranks)
    needs = [any(ctx.needs_input_grad[i]) for i in (0, 2, 3, 4)]
    grads = _gradients(
        dy,
        (x, topk_idx, topk_weights, gate_up, down),
        saved[0] if saved else [],
        generation,
        ctx.main_grad,
        ctx.options,
        ctx.grad_dtype,
        needs,
    )
    nothing = ([None] * len(buffers) for buffers in ctx.main_grad)
    return *grads, *nothing, *[None] * (len(ctx.options) + 1)


torch.library.register_autograd("weft::forward", _backward, setup_context=_setup_context)


class _HoldInputs(Function):
    """Identity on x, in front of the kernel: saves the inputs before it runs, and is its backward.

    Non-reentrant checkpointing recomputes a block only until the last tensor that it saved is saved
    again. With the inputs saved here, and nothing after, the kernel does not run a second time.
    """

    @staticmethod
    def forward(ctx, num_ranks, main_grad, config, *tensors):
        *ctx.options, ctx.grad_dtype = config
        ctx.group = group_of(config[0])
        ctx.num_ranks = num_ranks
        ctx.main_grad = main_grad
        ctx.save_for_backward(*tensors)
        return tensors[:num_ranks]

    @staticmethod
    def backward(ctx, *dy):
        needed = _by_rank(ctx.needs_input_grad[3:], ctx.num_ranks)
        needs = [any(needed[i]) for i in (0, 2, 3, 4)]
        inputs = _by_rank(ctx.saved_tensors, ctx.num_ranks)
        no_generation = torch.empty(0, dtype=torch.int64)
        grads = _gradients(
            dy, inputs, [], no_generation, ctx.main_grad, ctx.options, ctx.grad_dtype, needs
        )
        return None, None, None, *itertools.chain(*grads)


class _RunKernel(Function):
    """The kernel behind _HoldInputs: saves nothing, and hands dy on to it."""

    @staticmethod
    def forward(ctx, others, config, *x):
        y, _, _ = torch.ops.weft.forward(list(x), *others, *config)
        return tuple(y)

    @staticmethod
    def backward(ctx, *dy):
        return None, None, *dy


def _forward_of_held_inputs(inputs, config) -> list[Tensor]:
    x, *others = inputs
    main_grad = inputs[5:]
    held = _HoldInputs.apply(len(x), main_grad, config, *itertools.chain(*inputs[:5]))
    return list(_RunKernel.apply(others, config, *held))
