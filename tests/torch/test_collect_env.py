"""`python -m weft_moe.collect_env` and `weft.supports`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import weft_moe as weft


def test_collect_env_names_versions_and_what_can_run():
    done = subprocess.run(
        [sys.executable, "-m", "weft_moe.collect_env"], capture_output=True, text=True, check=True
    )
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["weft"] == weft.__version__
    assert rows["torch"] == torch.__version__
    assert rows["python"] == sys.version.split()[0]
    assert rows["weft compiled by"].startswith("g++ ")
    assert rows["shared memory"].startswith("/dev/shm, ")
    assert "CUDA driver" in rows and "CUDA devices" in rows
    assert {rows[f"cpu {precision}"] for precision in ("fp64", "fp32", "bf16", "fp8", "mxfp8")} == {
        "yes"
    }
    assert rows["cuda fp32"].startswith("no: ")


def test_supports_says_nothing_or_why_not():
    assert weft.supports(hidden=2048, intermediate=768, precision="bf16", device="cpu") == ""
    assert weft.supports(hidden=5, intermediate=3, precision="fp64") == ""
    assert "precision fp8 allows positive multiples of 128" in weft.supports(
        hidden=2048, intermediate=64, precision="fp8"
    )
    assert "num_experts is 10; it must be a positive multiple of ep_size = 4" in weft.supports(
        hidden=64, intermediate=64, num_experts=10, ep_size=4
    )
    assert "top_k is 9; allowed: 1 to 8" in weft.supports(
        hidden=64, intermediate=64, num_experts=8, top_k=9
    )
    for number in ("num_experts", "top_k", "ep_size"):
        for value in (2**32 + 1, 1 - 2**32):
            assert f"{number} is {value}; it must fit into 32 bits" in weft.supports(
                hidden=64, intermediate=64, **{number: value}
            )
    # No CUDA backend in this build, no device in this machine, or no such precision in the backend.
    assert "CUDA" in weft.supports(hidden=128, intermediate=128, precision="fp8", device="cuda")
    with pytest.raises(
        ValueError, match="precision = 'int8': choose one of 'fp64', 'fp32', 'bf16'"
    ):
        weft.supports(hidden=64, intermediate=64, precision="int8")


def test_groups_refuse_a_device_that_cannot_be_used():
    with pytest.raises(RuntimeError, match="CUDA"):
        weft.virtual_ep_group(2, device="cuda")


def test_without_the_compiled_ops_only_the_layer_is_missing():
    sources = Path(__file__).parents[2] / "python"
    code = f"""
import sys
from pathlib import Path
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
sys.path.insert(0, {str(sources)!r})
import weft_moe, weft_moe.train.dispatch, weft_moe.bench.layer
try:
    weft_moe.moe
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"weft_moe is not built: no weft_torch.so in {sources / 'weft_moe'}" in done.stdout, done


def test_supports_asks_the_gpu_that_is_named(monkeypatch):
    asked = []

    @contextlib.contextmanager
    def current(device):
        asked.append(torch.device(device))
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", current)
    sizes = {"hidden": 128, "intermediate": 128}
    weft.supports(**sizes, device="cuda")
    assert asked == []  # the current one
    weft.supports(**sizes, device="cuda:1")
    assert asked == [torch.device("cuda:1")]
    assert "'cuda:2': torch sees 2 CUDA devices" in weft.supports(**sizes, device="cuda:2")
