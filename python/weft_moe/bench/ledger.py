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

import torch

# What `sources_sha256` covers, and what must be committed for `commit` to name it.
_SOURCES = ("include", "src")


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
) -> None:
    """Write the results file and its plot, as PNG of the same name."""
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **describe_machine(device),
        "commit": commit(root),
        "sources_sha256": sources_sha256(root),
        "tests": tests,
        "layer": layer,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    plot(record, path.with_suffix(".png"))


def plot(record: dict, path: Path) -> None:
    """Bars of TFLOP/s a direction, with the dense product of the same regime as a line."""
    # The object interface: pyplot would look for a display.
    from matplotlib.figure import Figure

    rows = record["layer"]
    panels = list(dict.fromkeys((row["shape"], row["regime"]) for row in rows))
    figure = Figure(figsize=(4.2 * len(panels), 4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (shape, regime) in zip(all_axes, panels, strict=True):
        shown = [row for row in rows if (row["shape"], row["regime"]) == (shape, regime)]
        labels = [
            f"{row['implementation']} {row['precision']}\n{row['direction']}" for row in shown
        ]
        bars = axes.bar(labels, [row["tflops"] for row in shown], color="tab:blue")
        axes.bar_label(bars, [f"{row['ms']:.2f} ms" for row in shown], fontsize=8)
        dense = shown[0]["dense_tflops"]
        axes.axhline(dense, color="tab:gray", linestyle="--", label=f"dense product: {dense:.0f}")
        axes.set_title(f"{shape}, {regime}")
        axes.tick_params(axis="x", labelsize=7, labelrotation=30)
        axes.legend(loc="upper left", fontsize=8)
    all_axes[0].set_ylabel("TFLOP/s")
    figure.suptitle(f"{record['device']}, {record['date'][:10]}")
    figure.savefig(path, dpi=150)


def _attribute(suite: ElementTree.Element, name: str) -> int:
    return int(suite.get(name, 0))


def _output(*command: str) -> str:
    """What a command prints, or "" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
