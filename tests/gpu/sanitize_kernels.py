"""The kernels under compute-sanitizer, at a very small size: `./dev gpu --sanitize` runs this file, whose name keeps it
out of every other run, as it takes minutes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

weft = pytest.importorskip("weft_moe", exc_type=ImportError)

TIMEOUT_S = 600.0
FOUND = 99  # the exit code with which the sanitizer says that it found something
SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
)
# Kernels of namespace weft alone, by a part of their mangled names: torch's are many, and not what is looked at.
OPTIONS = (
    *("--kernel-name", "kns=4weft"),
    *("--error-exitcode", str(FOUND)),
    *("--target-processes", "application-only"),
)
# Tool -> options of its own. Libraries ask CUDA for what it may not have, and take its error for an answer.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": (), "synccheck": ()}

_reason = (
    "no CUDA device is visible"
    if not torch.cuda.is_available()
    else "there is no compute-sanitizer on PATH or in /usr/local/cuda"
    if SANITIZER is None
    else weft.supports(hidden=256, intermediate=128, device="cuda", training=True)
)
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["one_rank", "two_virtual_ranks"])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(tool: str, num_ranks: int) -> None:
    script = Path(__file__).with_name("sanitized_calls.py")
    process = subprocess.Popen(
        [
            *(SANITIZER, "--tool", tool, *TOOLS[tool], *OPTIONS),
            *(sys.executable, str(script), str(num_ranks)),
        ],
        # Without torch's cache an access behind a tensor is one behind an allocation.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(
            process.pid, signal.SIGKILL
        )  # the sanitizer, and the kernels with the process it runs
        output, _ = process.communicate()
        pytest.fail(f"{tool} was not done after {TIMEOUT_S:g} s:\n{output[-4000:]}")
    assert process.returncode == 0, output[-8000:]
