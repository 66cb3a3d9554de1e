"""The record of what was seen on a GPU: benchmarks/results/gpu.json, and the plot beside it.

Every figure comes from the run that writes the file. `sources_sha256` says which sources it ran.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

# What `sources_sha256` covers, and what must be committed for `commit` to name it.
_SOURCES = ("include", "src")

# What a results file has rows of, measured apart.
_LISTS = ("layer", "step")

# Implementation -> colour of its bars.
_COLORS = {"unfused": "tab:gray", "weft": "tab:blue"}


def sources_sha256(root: Path) -> str:
    """What `find include src -type f | LC_ALL=C sort | xargs sha256sum | sha256sum` prints."""
    paths = [
        Path(folder, name).relative_to(root).as_posix()
        for top in _SOURCES
        for folder, _, names in os.walk(root / top)
        for name in names
        if not Path(folder, name).is_symlink()
    ]
    total = hashlib.sha256()
    for path in sorted(paths, key=os.fsencode):
        digest = hashlib.sha256((root / path).read_bytes()).hexdigest()
        total.update(f"{digest}  {path}\n".encode())
    return total.hexdigest()


def commit(root: Path) -> str:
    """The checked-out commit, with "-dirty" where the sources differ from it; else "unknown"."""
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--", *_SOURCES)
    return f"{head}-dirty" if changed else head


def describe_machine(device: torch.device) -> dict[str, str]:
    """Device, driver and the versions that ran on it."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver.splitlines()[0] if driver else "unknown",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
    }


def count_tests(reports: Iterable[Path], skipped_list: Path | None = None) -> dict[str, int]:
    """Passed, failed and skipped tests of JUnit reports; each line of `skipped_list` is one more."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for report in reports:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            failed = _attribute(suite, "failures") + _attribute(suite, "errors")
            skipped = _attribute(suite, "skipped") + _attribute(suite, "disabled")
            counts["failed"] += failed
            counts["skipped"] += skipped
            counts["passed"] += _attribute(suite, "tests") - failed - skipped
    if skipped_list is not None:
        counts["skipped"] += len(skipped_list.read_text().splitlines())
    return counts


def write_record(
    path: Path,
    *,
    root: Path,
    device: torch.device,
    tests: dict[str, int],
    layer: list[dict[str, object]],
    breakdown: list[dict[str, object]],
) -> None:
    """Write the results file and its plot, as PNG of the same name."""
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **describe_machine(device),
        "commit": commit(root),
        "sources_sha256": sources_sha256(root),
        "tests": tests,
        "layer": layer,
        "breakdown": breakdown,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    plot(record, path.with_suffix(".png"))


def merge(
    path: Path, name: str, rows: list[dict[str, object]], key: tuple[str, ...]
) -> dict[str, Any]:
    """Put rows into the list `name` of a results file, in place of earlier ones that have the same
    values of `key`. All else in it stays; a file that is not there is made.

    Returns:
        What the file now holds.

    Raises:
        ValueError: the file is no results file; it is as before.
    """
    record = _read(path)

    def values(row: dict[str, object]) -> tuple[object, ...]:
        return tuple(row.get(field) for field in key)

    replaced = {values(row) for row in rows}
    record[name] = [row for row in record.get(name, []) if values(row) not in replaced] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = path.with_name(f".{path.name}.incomplete")
    incomplete.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(incomplete, path)
    return record


def is_of_other_sources(path: Path, root: Path) -> bool:
    """Whether a results file says that what is in it was measured with other sources than those of
    the checkout `root`.

    Raises:
        ValueError: the file is no results file.
    """
    measured = _read(path).get("sources_sha256")
    return measured is not None and measured != sources_sha256(root)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no results file ({error}): name another") from error
    lists = [record.get(name, []) for name in _LISTS] if isinstance(record, dict) else [None]
    if not all(isinstance(rows, list) for rows in lists):
        names = " and ".join(f"`{name}`" for name in _LISTS)
        raise ValueError(
            f"{path} is no results file, which is an object with lists {names}: name another"
        )
    return record


def plot(record: dict, path: Path) -> None:
    """TFLOP/s of each implementation a direction, with the dense product of the same regime as a
    line: one panel a shape and regime, at the shape's most tokens on one rank."""
    # The object interface: pyplot would look for a display.
    from matplotlib.figure import Figure

    rows = _plotted(record["layer"])
    panels = list(dict.fromkeys((row["shape"], row["regime"]) for row in rows))
    kinds = list(dict.fromkeys((row["implementation"], row["precision"]) for row in rows))
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    width = 0.84 / len(kinds)
    figure = Figure(figsize=(3.6 * len(panels), 4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (shape, regime) in zip(all_axes, panels, strict=True):
        shown = [row for row in rows if (row["shape"], row["regime"]) == (shape, regime)]
        for k, (implementation, precision) in enumerate(kinds):
            of_kind = [
                row
                for row in shown
                if (row["implementation"], row["precision"]) == (implementation, precision)
            ]
            bars = axes.bar(
                [
                    directions.index(row["direction"]) + (k - (len(kinds) - 1) / 2) * width
                    for row in of_kind
                ],
                [row["tflops"] for row in of_kind],
                width,
                color=_COLORS.get(implementation),
                label=f"{implementation} {precision}",
            )
            axes.bar_label(bars, [f"{row['ms']:.2f}" for row in of_kind], fontsize=8, padding=1)
        dense = shown[0]["dense_tflops"]
        axes.axhline(dense, color="black", linewidth=1, linestyle="--", label="dense product")
        axes.annotate(
            f"{dense:.0f}",
            (1, dense),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 2),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        axes.set_title(f"{shape}, {shown[0]['tokens_per_rank']} tokens, {regime}", fontsize=10)
        axes.set_xticks(
            range(len(directions)), [name.replace("_", "\n") for name in directions], fontsize=8
        )
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("TFLOP/s (on the bars: ms)")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"{record['device']}, {record['date'][:10]}")
    figure.savefig(path, dpi=150)


def _plotted(rows: list[dict]) -> list[dict]:
    """The rows of one rank with its shape's most tokens: other batches and ranks are for ratios."""
    alone = [row for row in rows if row["ep"] == 1]
    most: dict[str, int] = {}
    for row in alone:
        most[row["shape"]] = max(most.get(row["shape"], 0), row["tokens_per_rank"])
    return [row for row in alone if row["tokens_per_rank"] == most[row["shape"]]]


def _attribute(suite: ElementTree.Element, name: str) -> int:
    return int(suite.get(name, 0))


def _output(*command: str) -> str:
    """What a command prints, or "" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
