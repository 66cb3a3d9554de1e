"""weft_moe.debug without a GPU: its numbers are the header's, and what it cannot do is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import weft_moe as weft
from weft_moe import debug
from weft_moe.debug import Trace, debugging

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
