"""The wheel installs and works where no compiler is: built once, then used from a virtual environment of its own."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FORWARD = """
import torch, weft_moe as weft
torch.manual_seed(0)
x, weights = torch.randn(5, 8), torch.rand(5, 2)
idx = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, -1], [1, 1]])
gate_up, down = torch.randn(2, 8, 8), torch.randn(2, 8, 4)
y = weft.moe(x, idx, weights, gate_up, down, group=None, num_experts=2, precision="fp32")
expected = torch.zeros_like(x)
for t in range(5):
    for k in range(2):
        if idx[t, k] >= 0:
            g, u = (gate_up[idx[t, k]] @ x[t]).chunk(2)
            expected[t] += down[idx[t, k]] @ (weights[t, k] * torch.nn.functional.silu(g) * u)
torch.testing.assert_close(y, expected)
print("from", weft.__file__, "with torch", torch.__version__)
"""
# The oldest torch that the package names; the other tests have the newest.
OTHER_TORCH = "2.10.0"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, root: Path, run) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", f"--config-settings=build-dir={folder}/build")
    run(*PIP, "wheel", root, *options, "--wheel-dir", folder)
    (wheel,) = folder.glob("weft_moe-*.whl")
    return wheel


def make_venv(folder: Path, run) -> Path:
    """The Python of a fresh virtual environment."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory, wheel: Path, run) -> Path:
    """The Python of a fresh virtual environment that holds the wheel, and sees this one's torch but not its weft_moe."""
    python = make_venv(tmp_path_factory.mktemp("clean") / "venv", run)
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A plain path entry: this environment's own .pth files, and with them the editable weft_moe, are not followed.
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_forward_from_the_wheel(tmp_path: Path, clean_python: Path, run) -> None:
    printed = run(clean_python, "-c", FORWARD, cwd=tmp_path, env={"PATH": str(clean_python.parent)})
    assert str(clean_python.parents[1]) in printed


def test_collect_env_from_the_wheel(tmp_path: Path, clean_python: Path, run) -> None:
    command = (clean_python, "-m", "weft_moe.collect_env")
    printed = run(*command, cwd=tmp_path, env={"PATH": str(clean_python.parent)})
    assert re.search(r"^weft +\d+\.\d+\.\d+$", printed, re.MULTILINE), printed
    assert re.search(r"^cpu bf16 +yes$", printed, re.MULTILINE), printed


@pytest.mark.skipif(
    not os.environ.get("WEFT_TEST_ALL"),
    reason="./dev test --all: installs a second torch, several GB",
)
def test_the_same_wheel_with_another_torch(tmp_path: Path, wheel: Path, run) -> None:
    python = make_venv(tmp_path / "venv", run)
    run(*PIP, "--python", python, "install", "--quiet", f"torch=={OTHER_TORCH}", wheel)
    printed = run(python, "-c", FORWARD, cwd=tmp_path, env={"PATH": str(python.parent)})
    assert f"with torch {OTHER_TORCH}" in printed


def test_console_scripts(tmp_path: Path, clean_python: Path) -> None:
    for script in ("weft-train", "weft-bench"):
        command = [str(clean_python.parent / script), "--help"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={"PATH": ""}
        )
        assert done.returncode == 0, done.stderr
        assert "usage: " + script in done.stdout
