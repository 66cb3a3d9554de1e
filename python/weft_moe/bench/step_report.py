"""What is made of step measurements: ratios, entries of a results file, and stacked bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .ledger import merge
from .step import BASELINE, TODAY, WEFT, Measurement, StepRow
from .step_parts import PARTS

# Step time with Weft over that of the unfused baseline on one H200, by preset and layers: the most
# that it should be.
_MOST_OF_STEP = {("qwen3-30b-a3b", 8): 0.76, ("qwen3-235b-a22b", 2): 0.83}
_MOST_OF_DECODER = 0.73

# What tells the entries of a results file apart.
_KEY = ("preset", "num_layers", "ep", "backend", "precision")

_COLORS = dict(
    zip(PARTS, ("tab:blue", "tab:orange", "tab:green", "tab:gray", "lightgray"), strict=True)
)


@dataclass(frozen=True)
class StepRatio:
    """Weft's figure over that of `other`, a backend; `target` is the most it should be on an H200, or
    None."""

    row: StepRow
    other: str
    meaning: str
    value: float
    target: float | None


def step_ratios(measurements: Iterable[Measurement]) -> Iterator[StepRatio]:
    """Each measurement of Weft beside the others of the same case: whole step and decoder layers
    alone; beside the baseline also peak memory, and with targets."""
    measurements = list(measurements)
    found = {(_case(m.row), m.row.backend): m for m in measurements}
    for own in measurements:
        row = own.row
        if row.backend != WEFT:
            continue
        if other := found.get((_case(row), BASELINE)):
            target = _MOST_OF_STEP.get((row.preset, row.num_layers)) if row.ep == 1 else None
            decoder = None if target is None else _MOST_OF_DECODER
            yield from _time_ratios(own, other, target, decoder)
            # Of a CPU it is the most that the process ever had, whichever backend ran.
            most = None if row.mfu is None else 1.0
            peak = row.peak_gib / other.row.peak_gib
            yield StepRatio(row, BASELINE, "peak memory", peak, most)
        if other := found.get((_case(row), TODAY)):
            yield from _time_ratios(own, other)


def _time_ratios(
    own: Measurement, other: Measurement, step: float | None = None, decoder: float | None = None
) -> Iterator[StepRatio]:
    """`step` and `decoder` are their targets."""
    backend = other.row.backend
    yield StepRatio(own.row, backend, "step", own.row.step_s / other.row.step_s, step)
    value = own.decoder_s / other.decoder_s
    yield StepRatio(own.row, backend, "decoder layers alone", value, decoder)


def merge_rows(path: Path, rows: Iterable[StepRow]) -> None:
    """Put rows under `step` of a results file, in place of earlier ones of the same case, backend
    and precision, as `ledger.merge` does."""
    merge(path, "step", [row.as_dict() for row in rows], _KEY)


def plot_steps(measurements: list[Measurement], title: str, path: Path) -> None:
    """Step time by parts, a bar a backend, a group of bars a case, as PNG."""
    # The object interface: pyplot would look for a display.
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(_case(m.row) for m in measurements))
    # A gap between cases.
    places = [cases.index(_case(m.row)) + i for i, m in enumerate(measurements)]
    figure = Figure(figsize=(max(6.0, 1.6 + 1.5 * len(measurements)), 4.2), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(measurements)
    for part in PARTS:
        heights = [m.shares[part] * m.row.step_s * 1e3 for m in measurements]
        axes.bar(places, heights, 0.8, bottoms, color=_COLORS[part], label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, top in zip(places, bottoms, strict=True):
        axes.annotate(f"{top:.0f}", (place, top), ha="center", va="bottom", fontsize=9)
    labels = [
        f"{m.row.backend} {m.row.precision}\n{m.row.preset}\n{m.row.num_layers} layers, EP {m.row.ep}"
        for m in measurements
    ]
    axes.set_xticks(places, labels, fontsize=8)
    axes.set_ylabel("ms a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS))
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _case(row: StepRow) -> tuple[object, ...]:
    return row.preset, row.num_layers, row.ep
