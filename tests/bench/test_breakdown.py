"""The breakdown of a call: what a trace says, which phases are timed, and how it is written down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from weft_moe.bench.breakdown import KINDS, Breakdown, break_down, time_parts, wanted_phases
from weft_moe.bench.cli import main
from weft_moe.bench.layer import DIRECTIONS, Case
from weft_moe.bench.timeline import plot_timeline, summarize
from weft_moe.bench.timing import Launch


@dataclass(frozen=True)
class Span:
    kind: str
    begin_ns: int
    end_ns: int
    sm: int


# Two SMs: CTAs start at 1 and 1.1 ms, matrix tasks at 1.2 and 1.4 and end at 3, sums end at 3.5.
RECORDS = [
    Span("load", 1_000_000, 2_900_000, 0),
    Span("load", 1_100_000, 2_900_000, 1),
    Span("pull", 1_010_000, 1_190_000, 0),
    Span("gate_up", 1_400_000, 2_000_000, 1),
    Span("gate_up", 1_200_000, 2_000_000, 0),
    Span("down", 2_000_000, 3_000_000, 0),
    Span("down", 2_000_000, 2_950_000, 1),
    Span("sum_tokens", 2_990_000, 3_500_000, 1),
]

BREAKDOWN = Breakdown(
    shape="tiny",
    precision="bf16",
    direction="forward",
    tokens_per_rank=64,
    regime="burst",
    plan_ms=0.03,
    kinds_ms={"gate_up": 1.0, "down": 2.0 / 3},
    matrix_ms=1.5,
    with_pulls_ms=1.6,
    with_combine_ms=1.7,
    whole_ms=1.9,
    start_bubble_ms=0.02,
    tail_ms=0.2,
)


def test_bubble_and_tail_lie_before_the_first_and_behind_the_last_matrix_task() -> None:
    summary = summarize(RECORDS)
    assert summary.span_ms == pytest.approx(2.5)
    assert summary.start_bubble_ms == pytest.approx((0.2 + 0.4) / 2)
    assert summary.tail_ms == pytest.approx(0.5)


def test_the_order_of_records_says_nothing() -> None:
    assert summarize(reversed(RECORDS)) == summarize(RECORDS)


def test_a_trace_without_matrix_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="no matrix task"):
        summarize(RECORDS[:3])


def test_timeline_is_a_picture(tmp_path: Path) -> None:
    plot_timeline(RECORDS, tmp_path / "timeline.png", "two SMs")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("direction", KINDS)
def test_parts_add_phases_to_the_matrix_tasks_alone(direction: str) -> None:
    parts = {name: set(phases) for name, phases in wanted_phases(direction).items()}
    assert not parts["plan"]
    assert set().union(*(parts[kind] for kind in KINDS[direction])) == parts["matrix"]
    assert parts["with_pulls"] - parts["matrix"] == {"pull"}
    assert parts["with_combine"] - parts["matrix"] == {"combine"}
    assert parts["whole"] == parts["with_pulls"] | parts["with_combine"]


def test_names_are_those_of_the_library() -> None:
    debug = pytest.importorskip("weft_moe.debug", exc_type=ImportError)
    for direction in KINDS:
        assert set(wanted_phases(direction)["whole"]) <= set(debug.PHASES)
        assert set(KINDS[direction]) <= set(debug.MATRIX_KINDS)


@pytest.mark.parametrize("direction", KINDS)
def test_phases_are_left_out_of_the_timed_call_alone_and_a_whole_one_comes_before(
    direction: str,
) -> None:
    debug = pytest.importorskip("weft_moe.debug", exc_type=ImportError)
    calls: list[tuple[str, int]] = []  # and the phases left out

    def step(name: str) -> None:
        calls.append((name, debug._debug[1]))

    def time_ms(launch: Launch, device: torch.device) -> float:
        for _ in range(2):
            launch()
        return 1.0

    launch = Launch(lambda: step("run"), lambda: step("prepare"))
    assert set(time_parts(direction, launch, time_ms, torch.device("cpu"))) == set(
        wanted_phases(direction)
    )
    expected = []
    for name, phases in wanted_phases(direction).items():
        kept = debug.PHASES if name == "whole" else phases
        left_out = sum(bit for phase, bit in debug.PHASES.items() if phase not in kept)
        whole = [("prepare", 0), ("run", 0)]
        # Without a phase the host would be timed: a whole call keeps the device busy meanwhile.
        before = [] if phases else whole
        expected += [*whole, *[*before, ("prepare", 0), ("run", left_out)] * 2]
    assert calls == expected


def test_written_down_with_five_digits() -> None:
    written = BREAKDOWN.as_dict()
    assert written["kinds_ms"] == {"gate_up": 1.0, "down": 0.66667}
    assert written["tail_ms"] == 0.2 and written["tokens_per_rank"] == 64


def test_printed_with_every_figure() -> None:
    text = "\n".join(BREAKDOWN.lines())
    for figure in ("1.900", "1.500", "1.600", "1.700", "0.030", "0.667", "0.020", "0.200"):
        assert figure in text, figure


def test_only_a_gpu_is_broken_down() -> None:
    cpu = torch.device("cpu")
    assert not list(
        break_down(Case("tiny", 16, DIRECTIONS), precision="bf16", device=cpu, note=print)
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timeline_says_that_it_needs_a_gpu(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "--output", str(tmp_path / "timeline.png")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
