"""The scripts of examples/ run as their first lines say, on one rank and on two."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3MoeForCausalLM

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", output, re.MULTILINE)]


def launch(num_ranks: int, script: str, *arguments: str | Path) -> list[float]:
    # sys.path has the stand-in of torchtitan at its end.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), EXAMPLES / script, *arguments]
    for _ in range(3):
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=120, env=environment
        )
        # Now and then a rank aborts so when its script is over: a thread of gloo, which
        # destroy_process_group leaves running, gives back the tensor of the last collective while
        # Python ends. It waits for the GIL, is ended there, and unwinds through a noexcept function
        # of torch. All else is an error at once.
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def test_huggingface(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", ["huggingface.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "huggingface.py"))
    alone = losses(capsys.readouterr().out)
    assert len(alone) == 5 and alone[-1] < alone[0]
    assert launch(2, "huggingface.py", tmp_path / "two") == pytest.approx(alone, rel=1e-2)
    Qwen3MoeForCausalLM.from_pretrained(tmp_path / "two")


def test_torchtitan(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(EXAMPLES / "torchtitan_override.py"))
    output = capsys.readouterr().out
    (alone,) = losses(output)
    assert "inner_experts.w1_EFD" in output and "gate_up" not in output
    assert launch(2, "torchtitan_override.py") == pytest.approx([alone], abs=2e-3)
