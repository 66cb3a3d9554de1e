"""What ptxas says of every kernel: no register spilled, no wgmma serialised, registers within the budget.

A kernel that spills or serialises its products is right and three times slower, so nothing else would tell. The build
keeps the words of ptxas in <build>/ptxas (cmake/ptxas_log.sh); without nvcc there are none.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Registers a thread at launch. The 384 threads of forward and backward share 65,536 registers of an SM.
BUDGET = {
    "forward_kernel": 168,
    "backward_kernel": 168,
    "plan_kernel": 64,
    "stage_kernel": 32,
    "reset_tickets_kernel": 32,
    "raise_flags_kernel": 64,
}


@pytest.fixture(scope="module")
def kernels(release_build: Path) -> dict[str, str]:
    """Mangled name of each kernel -> what ptxas says of it."""
    logs = sorted((release_build / "ptxas").rglob("*.txt"))
    if not logs:
        pytest.skip("this build has no CUDA backend: no nvcc was found")
    said: dict[str, str] = {}
    for log in logs:
        for part in log.read_text().split("Compiling entry function")[1:]:
            said[part.split("'")[1]] = part
    return said


def test_every_kernel_has_a_budget_and_keeps_it(kernels: dict[str, str]) -> None:
    for name, said in kernels.items():
        budget = [limit for kernel, limit in BUDGET.items() if kernel in name]
        assert len(budget) == 1, f"{name} is not in BUDGET"
        registers = int(re.search(r"Used (\d+) registers", said).group(1))
        assert registers <= budget[0], f"{name} uses {registers} registers"


def test_no_kernel_spills(kernels: dict[str, str]) -> None:
    for name, said in kernels.items():
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", said), f"{name}: {said}"


def test_no_kernel_serialises_wgmma(kernels: dict[str, str]) -> None:
    for name, said in kernels.items():
        assert not re.search(r"C75\d\d", said), f"{name}: {said}"
