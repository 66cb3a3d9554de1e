"""What `weft-bench plan` reads is what the C++ benchmark prints."""

from pathlib import Path

import pytest
from weft_moe.bench.cli import main


def test_plan_benchmark(release_build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = release_build / "benchmarks" / "weft_plan_benchmark"
    assert main(["plan", "--binary", str(binary), "--filter", "by_tokens/1024$"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "by_tokens/1024" in line]
    name, routes, passes, ms, ns_a_route = (cell.strip() for cell in row.strip("│ ").split("│"))
    assert (int(routes), int(passes)) == (65536, 1)
    assert float(ms) > 0
    assert float(ns_a_route) == pytest.approx(float(ms) * 1e6 / 65536, rel=0.01)


def test_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--binary", str(tmp_path / "nothing")]) == 2
    assert "nothing is not there: build it with ./dev build" in capsys.readouterr().err
