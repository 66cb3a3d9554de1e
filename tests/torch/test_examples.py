"""The scripts of examples/ run as their first lines say, on one rank and on two."""

from __future__ import annotations

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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), EXAMPLES / script, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def test_huggingface(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", ["huggingface.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "huggingface.py"))
    alone = losses(capsys.readouterr().out)
    assert len(alone) == 5 and alone[-1] < alone[0]
    assert launch(2, "huggingface.py", tmp_path / "two") == pytest.approx(alone, rel=1e-2)
    Qwen3MoeForCausalLM.from_pretrained(tmp_path / "two")
