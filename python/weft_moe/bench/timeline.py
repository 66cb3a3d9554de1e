"""What a trace of a call says: how long its SMs wait for the first matrix task, how long they work
without one at the end, and a picture of who did what when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_MATRIX = {
    "gate_up": "tab:blue",
    "down": "tab:cyan",
    "down_dgrad": "tab:blue",
    "gate_up_dgrad": "tab:cyan",
    "down_wgrad": "tab:green",
    "gate_up_wgrad": "tab:olive",
}
# Rows of an SM in the picture from below, and the colours of what is drawn in them. A ticket that
# found its flags raised and one that waited for them look the same: waits are part of a record.
_LANES = (
    {"pull": "tab:orange", "pulls_done": "tab:brown"},
    _MATRIX,
    {"combine": "tab:red", "sum_tokens": "tab:purple", "drain": "tab:brown"},
)


class Record(Protocol):
    """As in `weft_moe.debug`, which needs the compiled extension."""

    kind: str
    begin_ns: int
    end_ns: int
    sm: int


@dataclass(frozen=True)
class Summary:
    """Milliseconds of one traced call."""

    span_ms: float  # from the first CTA's start to the end of the last record
    start_bubble_ms: float  # from the first CTA's start to an SM's first matrix task; mean over SMs
    tail_ms: float  # from the last matrix task's end to the last record's


def summarize(records: Iterable[Record]) -> Summary:
    """Raises ValueError where no matrix task was recorded."""
    records = list(records)
    matrix = [record for record in records if record.kind in _MATRIX]
    if not matrix:
        raise ValueError("the trace has no matrix task: was anything computed?")
    begin = min(record.begin_ns for record in records)
    end = max(record.end_ns for record in records)
    first: dict[int, int] = {}
    for record in matrix:
        first[record.sm] = min(first.get(record.sm, record.begin_ns), record.begin_ns)
    return Summary(
        span_ms=(end - begin) / 1e6,
        start_bubble_ms=(sum(first.values()) / len(first) - begin) / 1e6,
        tail_ms=(end - max(record.end_ns for record in matrix)) / 1e6,
    )


def plot_timeline(records: Sequence[Record], path: Path, title: str) -> None:
    """Pulls, matrix tasks and sums of each SM over time, as PNG."""
    # The object interface: pyplot would look for a display.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin = min(record.begin_ns for record in records)
    sms = sorted({record.sm for record in records})
    row_of = {sm: row for row, sm in enumerate(sms)}
    bars: dict[tuple[int, int, str], list[tuple[float, float]]] = {}
    shown: dict[str, str] = {}
    for record in records:
        for lane, colors in enumerate(_LANES):
            if color := colors.get(record.kind):
                shown[record.kind] = color
                span = ((record.begin_ns - begin) / 1e6, (record.end_ns - record.begin_ns) / 1e6)
                bars.setdefault((row_of[record.sm], lane, color), []).append(span)
    figure = Figure(figsize=(14, 1.5 + 0.09 * len(sms)), layout="constrained")
    axes = figure.subplots()
    height = 1 / (len(_LANES) + 0.5)
    for (row, lane, color), spans in bars.items():
        axes.broken_barh(
            spans,
            (row + lane * height, 0.9 * height),
            facecolors=color,
            linewidth=0,
            rasterized=True,
        )
    summary = summarize(records)
    axes.axvline(summary.span_ms - summary.tail_ms, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, summary.span_ms)
    axes.set_ylim(0, len(sms))
    axes.set_xlabel("ms since the first CTA started; dashed: the last matrix task ends")
    axes.set_ylabel("SMs: pulls below, matrix tasks, sums above")
    axes.set_yticks([])
    axes.set_title(title, fontsize=10)
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in shown.items()],
        loc="outside lower center",
        ncols=len(shown),
        fontsize=8,
    )
    figure.savefig(path, dpi=150)
