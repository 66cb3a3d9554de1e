"""The routing-plan benchmark: runs the C++ program and shows its times in one table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from rich.console import Console
from rich.table import Table

DEFAULT_BINARY = Path("build/release/benchmarks/weft_plan_benchmark")


def run_plan_benchmark(binary: Path, console: Console, filter: str = ".") -> None:
    """Show milliseconds a plan and nanoseconds a route: level where the plan is linear in T * K.

    Args:
        binary: weft_plan_benchmark.
        console: where the table goes.
        filter: a regular expression of benchmark names.

    Raises:
        ValueError: the program is not built, or failed.
    """
    if not binary.is_file():
        raise ValueError(
            f"{binary} is not there: build it with ./dev build, or name it by --binary"
        )
    done = subprocess.run(
        [binary, "--benchmark_format=json", f"--benchmark_filter={filter}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"{binary} ended with {done.returncode}")
    table = Table(title="Routing plan of all ranks' top-k, one core")
    for column in ("benchmark", "routes", "passes", "ms", "ns a route"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for run in json.loads(done.stdout)["benchmarks"]:
        if run["run_type"] != "iteration":  # the fitted complexity
            continue
        ms, routes = run["cpu_time"], run["routes"]
        row = (f"{routes:.0f}", f"{run['passes']:.0f}", f"{ms:.3f}", f"{ms * 1e6 / routes:.2f}")
        table.add_row(run["name"], *row)
    console.print(table)
