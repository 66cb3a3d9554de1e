"""weft_moe.debug without a GPU: its numbers are the header's, what it cannot do is said, and
backwards are counted by where they found their rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import weft_moe as weft
from cases import Routing, make_problem, random_routing
from running import forward, leaves_of
from weft_moe import debug
from weft_moe.debug import Trace, backward_sources, debugging

HEADERS = Path(__file__).parents[2] / "include" / "weft"


def _enumerators(header: str, prefix: str) -> dict[str, int]:
    text = (HEADERS / header).read_text()
    found = re.findall(rf"\b{prefix}_(\w+) = (\d+)", text)
    return {name.lower(): int(value) for name, value in found}


def test_numbers_are_those_of_the_headers() -> None:
    assert debug.SCHEDULES == _enumerators("weft.h", "WEFT_SCHEDULE")
    phases = _enumerators("debug.h", "WEFT_PHASE")
    assert phases.pop("all") == sum(debug.PHASES.values())
    assert debug.PHASES == phases
    kinds = _enumerators("debug.h", "WEFT_TRACE")
    assert {name: number for number, name in enumerate(debug.TRACE_KINDS)} == kinds
    sources = _enumerators("weft.h", "WEFT_SOURCE")
    assert {name: number for number, name in enumerate(debug.BACKWARD_SOURCES)} == sources


def _call() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(50, 64).bfloat16().requires_grad_()
    gate_up = torch.randn(4, 128, 64).mul(0.1).bfloat16().requires_grad_()
    down = torch.randn(4, 64, 64).mul(0.1).bfloat16()
    idx = torch.rand(50, 4).topk(2).indices
    y = weft.moe(x, idx, torch.rand(50, 2), gate_up, down, num_experts=4)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, gate_up.grad]


def test_both_schedules_give_the_same_bits() -> None:
    expected = _call()
    for schedule in ("overlapped", "phased"):
        with debugging(schedule=schedule):
            actual = _call()
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), schedule


@pytest.mark.parametrize("options", [dict(skip=["pull"]), dict(max_delay_ns=10)], ids=str)
def test_the_cpu_has_no_probes_and_calls_after_the_context_are_as_ever(options: dict) -> None:
    with debugging(**options):
        with debugging():  # inside another the inner one holds, and then the outer one again
            _call()
        with pytest.raises(RuntimeError, match="the CUDA backend alone has"):
            _call()
    _call()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(schedule="fused"), r"schedule = 'fused': choose one of 'auto'"),
        (dict(skip=["dispatch"]), r"skip = 'dispatch': choose one of 'pull'"),
        (dict(max_delay_ns=-1), r"max_delay_ns is -1; allowed: 0 to"),
        (dict(seed=2**32), r"delay_seed is 4294967296; allowed: 0 to"),
        (dict(trace=Trace(4, device="cpu")), r"trace is a torch.int64 tensor on cpu; it must be"),
    ],
    ids=["schedule", "skip", "delay", "seed", "trace"],
)
def test_what_cannot_be_asked_for_is_said(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words), debugging(**options):
        pass


def test_records_are_read_as_the_kernel_writes_them() -> None:
    """The layout of weft_trace_record, little-endian."""
    trace = Trace(3, device="cpu")
    trace.buffer[0, 0] = 1
    trace.buffer[1] = torch.tensor([100, 250, 8 | 1 << 32, 131 | 2 << 32])
    assert trace.records() == [debug.Record("combine", 100, 250, rank=1, sm=131, warp=2)]
    trace.buffer[0, 0] = 4
    with pytest.raises(ValueError, match="4 records, room for 3"):
        trace.records()
    trace.clear()
    assert trace.records() == []


def _counted(call: Callable[[], object]) -> dict[str, int]:
    """By how much the counts grew in a call, of those that did."""
    before = backward_sources()
    call()
    grown = {way: count - before[way] for way, count in backward_sources().items()}
    return {way: count for way, count in grown.items() if count != 0}


class Layer:
    """A layer on the ranks of a routing; `forward` returns the backward of what it did."""

    def __init__(self, routing: Routing, **options) -> None:
        self.problem = make_problem(routing, hidden=4, intermediate=3)
        self.leaves = leaves_of(self.problem)
        self.group = weft.virtual_ep_group(routing.ep_size, max_tokens=256)
        self.options = options

    def forward(self) -> Callable[[], object]:
        y = forward(self.problem, self.leaves, "fp64", self.group, **self.options)
        leaves = [leaf for of_ranks in self.leaves for leaf in of_ranks]
        return lambda: torch.autograd.grad(y, leaves, self.problem.dy, retain_graph=True)


def _layer(ep_size: int, **options) -> Layer:
    return Layer(random_routing(4, 2, [5, 3][:ep_size]), **options)


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ep_size(request: pytest.FixtureRequest) -> int:
    return request.param


def test_counts_have_names_and_a_forward_is_none(ep_size: int) -> None:
    assert set(backward_sources()) == {"saved", "workspace", "recomputed"}
    assert _counted(_layer(ep_size).forward) == {}


def test_right_behind_its_forward_a_backward_finds_the_workspace_and_only_once(
    ep_size: int,
) -> None:
    backward = _layer(ep_size).forward()
    assert _counted(backward) == {"workspace": ep_size}
    assert _counted(backward) == {"saved": ep_size}


def test_behind_another_forward_a_backward_takes_what_was_saved(ep_size: int) -> None:
    layer = _layer(ep_size)
    first, second = layer.forward(), layer.forward()
    assert _counted(first) == {"saved": ep_size}
    assert _counted(second) == {"saved": ep_size}, "the first took the workspace from the second"


def test_layers_in_a_row_all_but_the_last_take_what_was_saved(ep_size: int) -> None:
    layer = _layer(ep_size)
    backwards = [layer.forward() for _ in range(3)]
    assert [_counted(backward) for backward in reversed(backwards)] == [
        {"workspace": ep_size},
        {"saved": ep_size},
        {"saved": ep_size},
    ]


def test_a_layer_that_saves_its_inputs_recomputes(ep_size: int) -> None:
    """Always: its forward may be one without a backward, and so keeps no workspace."""
    assert _counted(_layer(ep_size, save="inputs").forward()) == {"recomputed": ep_size}


def test_several_passes_are_recomputed_on_the_cpu() -> None:
    """Every route leads to the first of two ranks: more rows than it has room for at once."""
    routing = Routing(4, [idx % 2 for idx in random_routing(2, 2, [256, 256]).topk_idx])
    assert _counted(Layer(routing).forward()) == {"recomputed": 2}


def test_a_backward_that_fails_is_not_counted() -> None:
    backward = _layer(1).forward()

    def fail() -> None:
        with debugging(max_delay_ns=10), pytest.raises(RuntimeError, match="the CUDA backend"):
            backward()

    assert _counted(fail) == {}


def test_backwards_of_all_threads_are_counted() -> None:
    num_threads, num_calls = 4, 50
    layers = [_layer(1) for _ in range(num_threads)]

    def run(layer: Layer) -> None:
        for _ in range(num_calls):
            layer.forward()()

    def run_all() -> None:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(run, layers))

    assert _counted(run_all) == {"workspace": num_threads * num_calls}
