"""The user's pages hold: their Python runs, and their memory table is that of the formulas and of the library."""

import re
import sys
from pathlib import Path

import pytest
import torch
import weft_moe as weft

SCRIPT = "# train.py"
FOR_A_GPU = "# needs a GPU"


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run_blocks(page: Path) -> dict[str, object]:
    """Runs the examples of a page in order and in one namespace, which it returns. Scripts have a test of their own."""
    names: dict[str, object] = {}
    for block in blocks(page):
        code = compile(block, page.name, "exec")
        if not block.startswith((SCRIPT, FOR_A_GPU)):
            exec(code, names)
    return names


@pytest.fixture(scope="module")
def guide(root: Path) -> Path:
    return root / "docs/guide.md"


def test_examples_run(root: Path, guide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(guide)
    run_blocks(root / "docs/troubleshooting.md")
    assert "trains on the CPU" in capsys.readouterr().out


@pytest.mark.skipif(
    bool(weft.supports(hidden=256, intermediate=128, device="cuda")),
    reason=weft.supports(hidden=256, intermediate=128, device="cuda"),
)
def test_examples_for_a_gpu_run(guide: Path) -> None:
    for block in blocks(guide):
        if block.startswith(FOR_A_GPU):
            exec(compile(block, guide.name, "exec"), {"torch": torch, "weft": weft})


def test_training_script_runs_on_ranks(guide: Path, tmp_path: Path, run) -> None:
    (script,) = [block for block in blocks(guide) if block.startswith(SCRIPT)]
    program = tmp_path / "train.py"
    program.write_text(script)
    # As the guide starts it.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    printed = run(sys.executable, *launch, program, "2", timeout=120)
    losses = [float(loss) for loss in re.findall(r"step \d on \w+, 4 ranks: loss (\S+)", printed)]
    assert len(losses) == 3 and all(0 < loss < 2 for loss in losses), printed


def test_memory_table_follows_from_the_formulas(guide: Path) -> None:
    memory = run_blocks(guide)["memory"]
    cell = r" +\| +".join(r"([\d.]+)" for _ in range(6))
    rows = re.findall(rf"^\| (\d+) x (\d+) \| {cell} \|$", guide.read_text(), re.MULTILINE)
    assert len(rows) == 4
    for hidden, intermediate, ep, *figures in rows:
        h, i, ep = int(hidden), int(intermediate), int(ep)
        saved, *workspaces, symmetric = memory(T=16384, H=h, I=i, K=8, E=128, EP=ep)
        expected = [saved, *workspaces, symmetric, 3 * h * i * 2 * 128 / ep / 2**30]
        # Workspaces hold the plan as well.
        plan = 0.01 if ep == 1 else 0.07
        expected[1:3] = [bytes + plan for bytes in expected[1:3]]
        assert [float(figure) for figure in figures] == pytest.approx(expected, abs=0.0101)


@pytest.mark.parametrize("ep", [1, 8])
def test_saved_bytes_are_those_of_the_library(guide: Path, ep: int) -> None:
    memory = run_blocks(guide)["memory"]
    for tokens, top_k in ((16384, 8), (100, 3), (1, 1)):
        group = weft.virtual_ep_group(ep)
        saved = torch.ops.weft.saved_bytes(
            group.id, True, 2048, 768, 128, top_k, weft.library.PRECISIONS["bf16"], 0, tokens, 0.0
        )
        assert memory(T=tokens, H=2048, I=768, K=top_k, E=128, EP=ep)[0] * 2**30 == saved


def test_environment_variables_are_all_that_is_read(root: Path) -> None:
    """What the page lists as read by the package is what the sources read, and the library reads none."""
    page = (root / "docs/troubleshooting.md").read_text()
    read = set()
    for path in (root / "python").rglob("*.py"):
        read |= set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', path.read_text()))
        read |= set(re.findall(r'"(\w+)" in os\.environ', path.read_text()))
    (row,) = [line for line in page.splitlines() if "| `weft-train`" in line]
    assert read == set(re.findall(r"`([A-Z_]+)`", row))
    sources = [path for path in (root / "src").rglob("*") if path.suffix in (".cpp", ".hpp", ".cu")]
    assert not [path for path in sources if "getenv" in path.read_text()]
