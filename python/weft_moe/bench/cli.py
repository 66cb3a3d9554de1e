"""weft-bench: the layer and its memory, training steps, the routing plan, the record of a GPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from ..train.dispatch import ACTIVATION_DTYPES
from . import ledger
from .breakdown import KINDS, Breakdown, break_down, traced
from .layer import (
    DIRECTIONS,
    ROW_KEY,
    SHAPES,
    Case,
    Problem,
    Row,
    dispatch_for,
    make_launch,
    measure,
)
from .peers import join_peers, was_launched
from .plan import DEFAULT_BINARY, run_plan_benchmark
from .ratios import ratios
from .timeline import plot_timeline, summarize
from .timing import REGIMES

if TYPE_CHECKING:
    from .step import StepCase

_USAGE_ERROR = 2
_MIB = 2**20

_RECORD_SHAPES = ("30b", "235b")
_TOKENS = {"cuda": 16384, "cpu": 512}
# What stands in a record: the project's two shapes at a training step's token count, and a batch of
# a quarter, in which the fixed cost of a call shows: alone, and on each of four ranks.
_RECORD_CASES = (
    *(Case(shape, _TOKENS["cuda"]) for shape in _RECORD_SHAPES),
    *(Case("30b", _TOKENS["cuda"] // 4, ("forward", "backward"), ep) for ep in (1, 4)),
)
# Training steps: as deep as one H200 holds with room to spare.
_STEP_CASES = {"cuda": ("qwen3-30b-a3b:8", "qwen3-235b-a22b:2"), "cpu": ("tiny:2",)}
_STEP_TOKENS = {"cuda": 16384, "cpu": 128}
# Ranks of the memory table.
_MEMORY_EP = (1, 2, 4, 8)
# A dense product large enough to reach the device's rate and small enough to be quick on it.
_DENSE_SIZE = {"cuda": 8192, "cpu": 1024}


def main(argv: list[str] | None = None) -> int:
    """The console script. Returns 0, or 2 where the request cannot be met, with the reason."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments, Console(soft_wrap=True, highlight=False))
    except (ValueError, ImportError) as error:
        print(f"weft-bench: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft-bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    layer = commands.add_parser(
        "layer",
        help="time forward and backward of one layer; under torchrun, shared by the ranks too",
    )
    layer.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    layer.add_argument("--shape", choices=tuple(SHAPES), nargs="+", help="default: by device")
    layer.add_argument(
        "--tokens", type=int, nargs="+", help="tokens of the rank, one count or several; by device"
    )
    layer.add_argument(
        "--virtual-ranks", type=int, help="also share the tokens out to this many ranks"
    )
    layer.add_argument("--precision", choices=tuple(ACTIVATION_DTYPES), default="bf16")
    layer.add_argument("--regime", choices=tuple(REGIMES), nargs="+", default=tuple(REGIMES))
    layer.add_argument("--direction", choices=DIRECTIONS, nargs="+", default=DIRECTIONS)
    layer.add_argument("--output", type=Path, help="JSON to put the rows into")
    layer.add_argument("--root", type=Path, default=Path(), help="the checkout that is measured")
    layer.set_defaults(run=_run_layer)

    timeline = commands.add_parser("timeline", help="plot what each SM of a GPU does in a call")
    timeline.add_argument("--shape", choices=tuple(SHAPES), default="30b")
    timeline.add_argument("--tokens", type=int, default=_TOKENS["cuda"])
    timeline.add_argument("--direction", choices=tuple(KINDS), default="forward")
    timeline.add_argument("--precision", choices=tuple(ACTIVATION_DTYPES), default="bf16")
    timeline.add_argument("--output", type=Path, required=True, help="PNG")
    timeline.set_defaults(run=_run_timeline)

    memory = commands.add_parser("memory", help="print the bytes that a rank needs")
    memory.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    memory.add_argument("--shape", choices=tuple(SHAPES), nargs="+", default=_RECORD_SHAPES)
    memory.add_argument("--tokens", type=int, default=_TOKENS["cuda"], help="most tokens of a rank")
    memory.add_argument("--ep", type=int, nargs="+", default=_MEMORY_EP, help="ranks")
    memory.add_argument("--precision", choices=tuple(ACTIVATION_DTYPES), default="bf16")
    memory.set_defaults(run=_run_memory)

    step = commands.add_parser(
        "step", help="time training steps with each dispatch; under torchrun, on several GPUs"
    )
    step.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    step.add_argument(
        "--case", nargs="+", metavar="PRESET:LAYERS", help="default: what fits one H200; by device"
    )
    step.add_argument("--tokens", type=int, help="of a rank, in one sequence; default: by device")
    step.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    step.add_argument("--precision", choices=tuple(ACTIVATION_DTYPES), default="bf16")
    step.add_argument("--param-dtype", choices=("bf16", "fp32"), default="bf16")
    step.add_argument("--no-compile", dest="compile", action="store_false")
    step.add_argument("--warm-up", type=int, default=5, help="steps before the timed ones")
    step.add_argument("--steps", type=int, default=20, help="the last of the timed steps")
    step.add_argument(
        "--output", type=Path, help="JSON to put the rows into; a plot lies beside it"
    )
    step.add_argument("--root", type=Path, default=Path(), help="the checkout that is measured")
    step.set_defaults(run=_run_step)

    plan = commands.add_parser("plan", help="time the routing plan on the CPU")
    plan.add_argument("--binary", type=Path, default=DEFAULT_BINARY)
    plan.add_argument("--filter", default=".", help="a regular expression of benchmark names")
    plan.set_defaults(run=_run_plan)

    record = commands.add_parser("record", help="benchmark this GPU and write the results file")
    record.add_argument("--root", type=Path, default=Path(), help="the checkout")
    record.add_argument("--output", type=Path, required=True, help="JSON; the plot lies beside it")
    record.add_argument("--tests", type=Path, nargs="*", default=[], help="JUnit reports to count")
    record.add_argument("--skipped", type=Path, help="a file with a line a test that was not built")
    record.set_defaults(run=_run_record)
    return parser


def _run_layer(arguments: argparse.Namespace, console: Console) -> None:
    device = _device(arguments.device)
    shapes = arguments.shape or (_RECORD_SHAPES if device.type == "cuda" else ("tiny",))
    tokens = arguments.tokens or [_TOKENS[device.type]]
    if min(tokens) < 1:
        raise ValueError(f"--tokens {min(tokens)}: at least 1")
    directions = tuple(arguments.direction)
    cases = [Case(shape, count, directions) for shape in shapes for count in tokens]
    if arguments.virtual_ranks is not None:
        if was_launched():
            raise ValueError("--virtual-ranks is for one process, and a launcher started several")
        cases += [_shared_out(case, arguments.virtual_ranks) for case in cases]
    with join_peers(device) as (peers, device):
        console.quiet = peers.rank > 0
        _note_other_sources(arguments, console)
        if peers.size > 1:
            cases += [replace(case, ep=peers.size, virtual=False) for case in cases]
        options = dict(precision=arguments.precision, regimes=tuple(arguments.regime), peers=peers)
        rows = list(_measure(cases, console, device=device, **options))
        _print_ratios(rows, console)
        if arguments.output is not None and peers.rank == 0:
            written = [row.as_dict() for row in rows]
            record = ledger.merge(arguments.output, "layer", written, ROW_KEY)
            if "date" in record:  # a record of a GPU, beside which its plot lies
                ledger.plot(record, arguments.output.with_suffix(".png"))
            console.print(f"wrote {arguments.output}")
        if peers.size == 1:
            _break_down(cases, console, device=device, precision=arguments.precision)


def _shared_out(case: Case, num_ranks: int) -> Case:
    """The same work on virtual ranks."""
    if not 2 <= num_ranks <= 64 or case.tokens_per_rank % num_ranks:
        raise ValueError(
            f"--virtual-ranks {num_ranks} with {case.tokens_per_rank} tokens: 2 to 64 ranks, which "
            "share the tokens evenly"
        )
    return replace(case, tokens_per_rank=case.tokens_per_rank // num_ranks, ep=num_ranks)


def _run_timeline(arguments: argparse.Namespace, console: Console) -> None:
    device = _device("cuda")
    problem = Problem(SHAPES[arguments.shape], arguments.tokens, arguments.precision, device)
    direction = arguments.direction
    dispatch = dispatch_for("weft", problem, direction)
    records = traced(make_launch(direction, dispatch, problem), device)
    title = f"{arguments.shape} {direction}, {arguments.tokens} tokens, {arguments.precision}"
    plot_timeline(records, arguments.output, title)
    summary = summarize(records)
    console.print(
        f"{title}: {summary.span_ms:.3f} ms, start bubble {summary.start_bubble_ms:.3f}, tail "
        f"{summary.tail_ms:.3f}"
    )
    console.print(f"wrote {arguments.output}")


def _run_memory(arguments: argparse.Namespace, console: Console) -> None:
    _print_memory(
        console,
        device=_device(arguments.device),
        shapes=tuple(arguments.shape),
        ep_sizes=tuple(arguments.ep),
        num_tokens=arguments.tokens,
        precision=arguments.precision,
    )


def _run_step(arguments: argparse.Namespace, console: Console) -> None:
    # Needs transformers, which other commands do without.
    from .step import BASELINE, StepOptions, measure_steps
    from .step_report import merge_rows, plot_steps, step_ratios

    device = _device(arguments.device)
    cases = [_step_case(text) for text in arguments.case or _STEP_CASES[device.type]]
    options = StepOptions(
        device=device.type,
        tokens=arguments.tokens or _STEP_TOKENS[device.type],
        ep=arguments.ep,
        precision=arguments.precision,
        param_dtype=arguments.param_dtype,
        compile=arguments.compile,
        warm_up=arguments.warm_up,
        steps=arguments.steps,
    )
    is_first = os.environ.get("RANK", "0") == "0"
    console.quiet = not is_first
    _note_other_sources(arguments, console)
    measurements = []
    for case in cases:
        for measured in measure_steps(case, options, console.print):
            measurements.append(measured)
            row = measured.row
            mfu = "-" if row.mfu is None else f"{row.mfu:.1%}"
            console.print(
                f"  {row.backend:<13}{row.precision:<8} step {row.step_s * 1e3:.1f} ms  "
                f"{row.tokens_per_s_per_gpu:,.0f} tokens/s/GPU  MFU {mfu}  peak {row.peak_gib:.1f} "
                f"GiB  loss {measured.loss:.3f}"
            )
            shares = (f"{part} {share:.1%}" for part, share in measured.shares.items())
            console.print(f"                {'  '.join(shares)}")
            if arguments.output is not None and is_first:  # now: a later case may fail
                merge_rows(arguments.output, [row])
    for row in (measured.row for measured in measurements):
        if row.backend == BASELINE:  # the bound of the ratios below, however fast experts become
            console.print(
                f"{row.title}: a step without MoE would be {row.share_without_moe:.3f} of "
                f"{BASELINE}'s"
            )
    for ratio in step_ratios(measurements):
        target = "" if ratio.target is None else f"  target on an H200: at most {ratio.target:g}"
        console.print(
            f"{ratio.row.title}: {ratio.meaning}, {ratio.row.backend} : {ratio.other}: "
            f"{ratio.value:.3f}{target}"
        )
    if arguments.output is not None and is_first:
        picture = arguments.output.with_name(f"{arguments.output.stem}_step.png")
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        plot_steps(measurements, f"Training step, {options.tokens} tokens a rank, {name}", picture)
        console.print(f"wrote {arguments.output} and {picture}")


def _note_other_sources(arguments: argparse.Namespace, console: Console) -> None:
    output = arguments.output
    if output is not None and ledger.is_of_other_sources(output, arguments.root):
        console.print(f"note: {output} has rows of other sources than those here")


def _step_case(text: str) -> StepCase:
    from .step import StepCase

    preset, _, layers = text.partition(":")
    if not layers.isdecimal():
        raise ValueError(
            f"--case {text}: write PRESET:LAYERS with a preset of the trainer and a number, such as "
            "qwen3-30b-a3b:8"
        )
    return StepCase(preset, int(layers))


def _run_plan(arguments: argparse.Namespace, console: Console) -> None:
    run_plan_benchmark(arguments.binary, console, arguments.filter)


def _run_record(arguments: argparse.Namespace, console: Console) -> None:
    device = _device("cuda")
    tests = ledger.count_tests(arguments.tests, arguments.skipped)
    rows: list[Row] = []
    fault = None
    try:
        for row in _measure(_RECORD_CASES, console, device=device, precision="bf16"):
            rows.append(row)
    except (ValueError, RuntimeError) as error:  # what was measured before it stands
        fault = error
    _print_ratios(rows, console)
    try:
        _print_memory(console, device=device)
    except (ValueError, ImportError) as reason:
        console.print(f"no memory to show: {reason}")
    breakdown = _break_down(_RECORD_CASES, console, device=device, precision="bf16")
    ledger.write_record(
        arguments.output,
        root=arguments.root,
        device=device,
        tests=tests,
        layer=[row.as_dict() for row in rows],
        breakdown=[each.as_dict() for each in breakdown],
    )
    console.print(f"wrote {arguments.output} and {arguments.output.with_suffix('.png')}")
    if fault is not None:
        raise fault


def _measure(
    cases: Iterable[Case], console: Console, *, device: torch.device, **options
) -> Iterator[Row]:
    """Measure case after case; print and yield each row as it comes."""
    console.print(
        f"{'implementation':<15}{'shape':<6}{'ep':>2}{'tokens':>7}  {'precision':<10}{'direction':<19}"
        f"{'regime':<8}{'ms':>9}{'TFLOP/s':>10}{'dense':>9}{'share':>8}{'speedup':>9}  "
        f"{'repeatable':<12}source"
    )
    for case in cases:
        for row in measure(
            case, device=device, dense_size=_DENSE_SIZE[device.type], note=console.print, **options
        ):
            speedup = "-" if row.speedup is None else f"{row.speedup:.2f}"
            link = "" if row.nvlink_gb_s is None else f"  {row.nvlink_gb_s:.4g} GB/s received"
            console.print(
                f"{row.implementation:<15}{row.shape:<6}{row.ep:>2}{row.tokens_per_rank:>7}  "
                f"{row.precision:<10}{row.direction:<19}{row.regime:<8}{row.ms:>9.3f}"
                f"{row.tflops:>10.4g}{row.dense_tflops:>9.4g}{row.share_of_dense:>8.1%}"
                f"{speedup:>9}  {'yes' if row.repeatable else 'no':<12}{row.source or '-'}{link}"
            )
            yield row


def _break_down(
    cases: Iterable[Case], console: Console, *, device: torch.device, precision: str
) -> list[Breakdown]:
    """Break down case after case; print each as it comes."""
    breakdowns = []
    for case in cases:
        for each in break_down(case, precision=precision, device=device, note=console.print):
            console.print("\n".join(each.lines()))
            breakdowns.append(each)
    return breakdowns


def _print_ratios(rows: list[Row], console: Console) -> None:
    """A line a ratio, with the most that it should be."""
    for ratio in ratios(rows):
        row = ratio.row
        target = "" if ratio.target is None else f"  target on a GPU: at most {ratio.target:g}"
        console.print(
            f"{row.implementation} {row.shape} {row.precision} {row.direction}, {row.regime}: "
            f"{ratio.meaning}: {ratio.value:.2f}{target}"
        )


def _print_memory(
    console: Console,
    *,
    device: torch.device,
    shapes: tuple[str, ...] = _RECORD_SHAPES,
    ep_sizes: tuple[int, ...] = _MEMORY_EP,
    num_tokens: int = _TOKENS["cuda"],
    precision: str = "bf16",
) -> None:
    """The memory of one rank, a line for each shape and number of ranks."""
    from .memory import memory_of  # needs the compiled extension, which other commands do without

    backend = {"cuda": "CUDA backend", "cpu": "CPU backend"}[device.type]
    if not torch.cuda.is_available():
        backend += " (no GPU is visible)"
    rows = [
        memory_of(shape, ep_size=ep, num_tokens=num_tokens, precision=precision, device=device)
        for shape in shapes
        for ep in ep_sizes
    ]
    console.print(f"MiB of one rank, {backend}, {precision}, {num_tokens} tokens a rank")
    console.print(
        f"{'shape':<7}{'ep':>3}{'workspace':>12}{'forward part':>14}{'saved':>10}{'symmetric':>12}"
    )
    for row in rows:
        console.print(
            f"{row.shape:<7}{row.ep:>3}{row.workspace_bytes / _MIB:>12.1f}"
            f"{row.forward_workspace_bytes / _MIB:>14.1f}{row.saved_bytes / _MIB:>10.1f}"
            f"{row.symmetric_bytes / _MIB:>12.1f}"
        )


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "no CUDA device is visible to torch: use --device cpu, or check nvidia-smi"
        )
    return torch.device(name)
