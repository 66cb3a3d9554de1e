"""The layer benchmark: one expert-parallel layer a direction, beside cuBLAS and the unfused layer.

Inputs are random normal, routing is uniformly random over distinct experts, and FLOPs are the
layer's own arithmetic (`Shape.flops`), so padding or repeated work lowers a figure.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..train.dispatch import ACTIVATION_DTYPES, DISPATCHES, MoeLayer, make_dispatch
from .peers import ALONE, Peers
from .timing import REGIMES, Launch

# Implementation -> dispatch type. The first is the baseline of all others.
IMPLEMENTATIONS = {"unfused": "torch", "weft": "mega_moe"}
BASELINE = "unfused"

# Matrix products a direction does per routed row, each 2 * H * I FLOPs. What the three backwards
# differ in is where they find the rows x and z = [gate; up] of their forward:
#   backward            still in the workspace, as right behind the forward;
#   backward_saved      z is what the forward saved, and x is brought again: other layers have used
#                       the workspace since, as in training without checkpointing;
#   backward_recompute  nowhere: both are made again. The down projection is not needed again.
_PRODUCTS = {"forward": 3, "backward": 6, "backward_saved": 6, "backward_recompute": 8}
DIRECTIONS = tuple(_PRODUCTS)

# The longest wait of a virtual rank for another, in seconds: beyond any launch, yet a fault ends.
_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Shape:
    """What of a model the layer's cost depends on."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def flops(self, direction: str, num_tokens: int) -> int:
        """Arithmetic of a call with so many tokens over all ranks, when all routes are valid."""
        num_rows = num_tokens * self.top_k
        return _PRODUCTS[direction] * 2 * num_rows * self.hidden * self.intermediate


SHAPES = {
    "30b": Shape(hidden=2048, intermediate=768, num_experts=128, top_k=8),
    "235b": Shape(hidden=4096, intermediate=1536, num_experts=128, top_k=8),
    "tiny": Shape(hidden=256, intermediate=128, num_experts=16, top_k=4),
}


@dataclass(frozen=True)
class Case:
    """What `measure` measures: directions of a shape, a key of `SHAPES`, with so many tokens on each
    of `ep` ranks. Several are virtual, on one device, or have a process and a device each."""

    shape: str
    tokens_per_rank: int
    directions: tuple[str, ...] = DIRECTIONS
    ep: int = 1
    virtual: bool = True


@dataclass(frozen=True)
class Row:
    """One measurement; the fields of an entry under `layer` in a results file. Its work is that of
    one device, so of all ranks where they are virtual; its time that of the slowest rank."""

    implementation: str
    shape: str
    ep: int
    virtual: bool
    precision: str
    direction: str
    tokens_per_rank: int
    regime: str
    ms: float
    tflops: float
    dense_tflops: float
    share_of_dense: float
    unfused_ms: float | None  # None where the unfused layer cannot run the case
    speedup: float | None
    repeatable: bool
    # Which way Weft's timed backwards went, a name of `weft_moe.debug.backward_sources`. None for a
    # forward, for the unfused layer, and where they went different ways.
    source: str | None
    # Weft between devices: what the rank that receives most is sent in a call - rows that it pulls
    # and partial rows that come home - and that over the time.
    nvlink_bytes: int | None = None
    nvlink_gb_s: float | None = None

    def as_dict(self) -> dict[str, object]:
        """The row with its figures rounded to five digits, more than repeat."""
        return {
            key: float(f"{value:.5g}") if isinstance(value, float) else value
            for key, value in asdict(self).items()
        }


# What tells rows apart.
ROW_KEY = (
    "implementation",
    "shape",
    "ep",
    "virtual",
    "precision",
    "direction",
    "tokens_per_rank",
    "regime",
)


class Problem:
    """Random inputs of one layer, the same for the same arguments. `ep_size` ranks share the tokens
    and experts that one rank with all the tokens would have; where they are several, each entry of
    `inputs` is a list with one tensor a rank."""

    def __init__(
        self,
        shape: Shape,
        num_tokens: int,
        precision: str,
        device: torch.device,
        seed: int = 0,
        ep_size: int = 1,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        dtype = ACTIVATION_DTYPES[precision]

        def normal(*size: int, std: float = 1.0) -> Tensor:
            values = torch.randn(size, generator=generator, device=device, dtype=dtype)
            return values.mul_(std)

        def shared(whole: Tensor) -> list[Tensor]:
            return [part.requires_grad_() for part in whole.chunk(ep_size)]

        e, h, i = shape.num_experts, shape.hidden, shape.intermediate
        total = num_tokens * ep_size
        self.shape = shape
        self.num_tokens = num_tokens
        self.precision = precision
        self.device = device
        self.ep_size = ep_size
        x = shared(normal(total, h))
        gate_up = shared(normal(e, 2 * i, h, std=h**-0.5))
        down = shared(normal(e, h, i, std=i**-0.5))
        self.dy = normal(total, h).chunk(ep_size)
        scores = torch.rand(total, e, generator=generator, device=device)
        top = scores.topk(shape.top_k)
        self.topk_idx = top.indices
        topk_weights = shared(top.values / top.values.sum(1, keepdim=True))
        by_rank = (x, list(top.indices.chunk(ep_size)), topk_weights, gate_up, down)
        # The arguments of a dispatch, and those among them that get a gradient.
        self.inputs = by_rank if ep_size > 1 else tuple(tensors[0] for tensors in by_rank)
        self.leaves = (*x, *topk_weights, *gate_up, *down)

    def rows_per_expert(self) -> Tensor:
        return self.topk_idx.flatten().bincount(minlength=self.shape.num_experts)

    def of_rank(self, rank: int) -> Problem:
        """What one of several ranks brings, in memory of its own."""

        def own_copy(tensors: Sequence[Tensor]) -> Tensor:
            tensor = tensors[rank]
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        own = copy.copy(self)
        own.inputs = tuple(own_copy(tensors) for tensors in self.inputs)
        own.dy = own_copy(self.dy)
        own.leaves = tuple(tensor for tensor in own.inputs if tensor.requires_grad)
        return own

    def received_rows(self) -> tuple[Tensor, Tensor]:
        """By rank, what others send it in a forward: rows that it pulls, one a token with a route
        to its experts, and partial rows that come home, one a rank that a token goes to."""
        ranks = torch.arange(self.ep_size, device=self.device)
        goes_to = (self.topk_idx // (self.shape.num_experts // self.ep_size)).unsqueeze(-1) == ranks
        home = torch.arange(len(self.topk_idx), device=self.device) // self.num_tokens
        leaves_home = goes_to.any(1) & (home.unsqueeze(-1) != ranks)
        partial_rows = leaves_home.sum(1).view(self.ep_size, self.num_tokens).sum(1)
        return leaves_home.sum(0), partial_rows


def dispatch_for(
    implementation: str,
    problem: Problem,
    direction: str = "backward",
    process_group: dist.ProcessGroup | None = None,
) -> Callable[..., Tensor | list[Tensor]]:
    """For a layer whose `direction` will be measured; one that is checkpointed saves its inputs
    alone. Several ranks are those of the process group, or virtual without one. Raises ValueError,
    with the reason, where the implementation cannot run the problem."""
    layer = MoeLayer(
        num_experts=problem.shape.num_experts,
        hidden=problem.shape.hidden,
        intermediate=problem.shape.intermediate,
        precision=problem.precision,
        process_group=process_group,
        device=problem.device,
        training=direction != "forward",
        top_k=problem.shape.top_k,
        save="inputs" if direction == "backward_recompute" else "gate_up",
    )
    if problem.ep_size > 1 and process_group is None:
        return _virtual_dispatch(implementation, layer, problem.ep_size)
    return make_dispatch(IMPLEMENTATIONS[implementation], layer)


def _virtual_dispatch(
    implementation: str, layer: MoeLayer, ep_size: int
) -> Callable[..., list[Tensor]]:
    if implementation == BASELINE:
        raise ValueError("it has no virtual ranks")
    if reason := DISPATCHES[IMPLEMENTATIONS[implementation]].unsupported(layer, ep_size):
        raise ValueError(reason)
    import weft_moe  # needs the compiled extension, which the baseline does without

    return partial(
        weft_moe.moe,
        group=weft_moe.virtual_ep_group(ep_size, device=layer.device),
        num_experts=layer.num_experts,
        precision=layer.precision,
        save=layer.save,
        deadline_s=_DEADLINE_S,
    )


def make_launch(direction: str, dispatch: Callable, problem: Problem) -> Launch:
    """One launch of a direction. That of a backward is prepared by its forward, as in training: a
    backward finds rows in the workspace only right after, and only once.

    So `backward_saved` is prepared ahead, by two forwards or more. The backward of the oldest runs
    first: it finds the rows of the latest in the workspace, and takes it over, so that no other
    finds anything. One that is prepared alone would find its own rows."""
    if direction == "forward":
        return Launch(torch.no_grad()(lambda: dispatch(*problem.inputs)))
    if direction != "backward_recompute":
        forwards: deque[Tensor | list[Tensor]] = deque()
        return Launch(
            run=lambda: torch.autograd.grad(forwards.popleft(), problem.leaves, problem.dy),
            prepare=lambda: forwards.append(dispatch(*problem.inputs)),
            ahead=direction == "backward_saved",
        )
    y = checkpoint(dispatch, *problem.inputs, use_reentrant=False, preserve_rng_state=False)
    return Launch(lambda: torch.autograd.grad(y, problem.leaves, problem.dy, retain_graph=True))


@dataclass(frozen=True)
class SourcedLaunch(Launch):
    """A launch of Weft's layer that tells which way its timed backwards went. Those are the ones
    since a regime first asked for several at once with `prepared`: what it runs one by one before
    warms the device up, and there a `backward_saved` finds its own rows, prepared alone."""

    _before: dict[str, int] = field(default_factory=dict, init=False)

    def prepared(self, count: int) -> Launch:
        if not self._before:
            self._before.update(_backward_sources())
        return super().prepared(count)

    def sources(self) -> dict[str, int]:
        """How many of these backwards of a rank went each way, without the ways that none went."""
        grown = {way: count - self._before[way] for way, count in _backward_sources().items()}
        return {way: count for way, count in grown.items() if count > 0}


def _backward_sources() -> dict[str, int]:
    from ..debug import backward_sources  # needs the compiled extension

    return backward_sources()


def time_and_sources(
    launch: Launch, time_ms: Callable[[Launch, torch.device], float], device: torch.device
) -> tuple[float, dict[str, int]]:
    """Milliseconds of a launch of Weft's layer, and `SourcedLaunch.sources` of it."""
    sourced = SourcedLaunch(launch.run, launch.prepare, launch.ahead)
    return time_ms(sourced, device), sourced.sources()


def is_repeatable(direction: str, dispatch: Callable, problem: Problem) -> bool:
    """Whether two runs of a direction give the same bits: y, or every gradient."""
    ready = make_launch(direction, dispatch, problem).prepared(2)

    def run() -> tuple[Tensor, ...]:
        result = ready()
        return (result,) if isinstance(result, Tensor) else tuple(result)

    return all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def dense_launch(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Launch, int]:
    """A square product of random normal matrices, and its FLOPs."""
    generator = torch.Generator(device).manual_seed(1)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    out = torch.empty_like(a)
    return Launch(lambda: torch.matmul(a, b, out=out)), 2 * size**3


def measure(
    case: Case,
    *,
    precision: str,
    device: torch.device,
    regimes: tuple[str, ...] = tuple(REGIMES),
    dense_size: int,
    note: Callable[[str], None],
    peers: Peers = ALONE,
) -> Iterator[Row]:
    """Yield the rows of one case as they are measured: each implementation that can run it.
    Collective over `peers`, which share the layer if the case has so many ranks, and else measure
    it at the same time, a layer each.

    Args:
        case: what to measure.
        precision: of the layer; the dense product is in its activation dtype.
        device: where.
        regimes: which to measure.
        dense_size: rows and columns of the dense product.
        note: told what is left out and why, how even the routing is, and of timed backwards that
            went different ways.
    """
    problem = Problem(SHAPES[case.shape], case.tokens_per_rank, precision, device, ep_size=case.ep)
    counts = problem.rows_per_expert()
    ranks = f"{case.ep} {'virtual ' if case.virtual else ''}ranks of " if case.ep > 1 else ""
    note(
        f"{case.shape}: {ranks}{case.tokens_per_rank} tokens, {counts.sum().item()} routed rows, "
        f"{counts.min().item()} to {counts.max().item()} an expert"
    )
    between_devices = case.ep > 1 and not case.virtual
    ranks_a_device = 1 if between_devices else case.ep
    process_group = peers.group if between_devices else None
    received = problem.received_rows() if between_devices else None
    if between_devices:
        problem = problem.of_rank(peers.rank)
    dispatches: dict[str, dict[str, Callable]] = {direction: {} for direction in case.directions}
    for implementation in IMPLEMENTATIONS:
        for direction in case.directions:
            try:
                dispatches[direction][implementation] = dispatch_for(
                    implementation, problem, direction, process_group
                )
            except (ValueError, ImportError) as reason:
                note(f"{case.shape}: {implementation} {direction} is not measured: {reason}")
    repeatable = {
        (direction, implementation): peers.all(is_repeatable(direction, dispatch, problem))
        for direction in case.directions
        for implementation, dispatch in dispatches[direction].items()
    }

    for regime in regimes:
        time_ms = partial(REGIMES[regime], peers=peers)
        launch, dense_flops = dense_launch(dense_size, ACTIVATION_DTYPES[precision], device)
        dense_tflops = dense_flops / peers.slowest(time_ms(launch, device)) / 1e9
        for direction in case.directions:
            flops = problem.shape.flops(direction, ranks_a_device * case.tokens_per_rank)
            unfused_ms = None
            for implementation, dispatch in dispatches[direction].items():
                launch = make_launch(direction, dispatch, problem)
                if implementation == BASELINE:
                    unfused_ms = ms = peers.slowest(time_ms(launch, device))
                    sources = {}
                else:
                    ms, sources = time_and_sources(launch, time_ms, device)
                    ms = peers.slowest(ms)
                if len(sources) > 1:
                    ways = ", ".join(f"{count} {way}" for way, count in sources.items())
                    note(
                        f"{case.shape}: {implementation} {direction}, {regime}: backwards went "
                        f"different ways: {ways}"
                    )
                source = next(iter(sources)) if len(sources) == 1 else None
                nvlink_bytes = None
                if received is not None and implementation != BASELINE:
                    nvlink_bytes = _received_bytes(received, direction, source, problem)
                yield Row(
                    implementation=implementation,
                    shape=case.shape,
                    ep=case.ep,
                    virtual=case.ep > 1 and case.virtual,
                    precision=precision,
                    direction=direction,
                    tokens_per_rank=case.tokens_per_rank,
                    regime=regime,
                    ms=ms,
                    tflops=flops / ms / 1e9,
                    dense_tflops=dense_tflops,
                    share_of_dense=flops / ms / 1e9 / dense_tflops,
                    unfused_ms=unfused_ms,
                    speedup=None if unfused_ms is None else unfused_ms / ms,
                    repeatable=repeatable[direction, implementation],
                    source=source,
                    nvlink_bytes=nvlink_bytes,
                    nvlink_gb_s=None if nvlink_bytes is None else nvlink_bytes / ms / 1e6,
                )


def _received_bytes(
    received: tuple[Tensor, Tensor], direction: str, source: str | None, problem: Problem
) -> int:
    """Of a call, by the rank that receives most, with `Problem.received_rows`: a forward pulls x; a
    backward dy, and x unless its rows still lie in the workspace. Router gradients, a number a
    route, are left out."""
    pulled, partial_rows = received
    num_pulls = 1 if direction == "forward" or source == "workspace" else 2
    row_bytes = problem.shape.hidden * ACTIVATION_DTYPES[problem.precision].itemsize
    return int((num_pulls * pulled + partial_rows).max()) * row_bytes
