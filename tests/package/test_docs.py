"""The API reference builds without a warning: every reference leads somewhere, every public name has its words."""

import re
import shutil
import subprocess
import sys
from pathlib import Path


def build(source: Path, output: Path) -> tuple[int, str]:
    """Builds as ./dev docs does; the exit status and what was printed."""
    command = [sys.executable, "-m", "sphinx", "-EqW", "--keep-going", "-d", output / "cache"]
    done = subprocess.run(
        [*command, source, output], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def test_reference_builds_without_a_warning(tmp_path: Path, root: Path) -> None:
    assert build(root / "docs/api", tmp_path) == (0, "")
    page = (tmp_path / "index.html").read_text()
    for name in (
        "weft_moe.moe",
        "weft_moe.MoE.route",
        "weft_moe.debug.backward_sources",
        "weft_moe.state_dict.slice_experts",
    ):
        assert f'id="{name}"' in page
    assert 'href="#weft_moe.ep_group"' in page


def test_faults_are_found(tmp_path: Path, root: Path) -> None:
    source = shutil.copytree(root / "docs/api", tmp_path / "api")
    index = source / "index.rst"
    without_check = index.read_text().replace(".. autofunction:: weft_moe.check", "`weft.nothing`")
    index.write_text(without_check)
    status, printed = build(source, tmp_path / "html")
    assert status == 1
    assert "reference target not found: weft_moe.nothing" in printed
    assert "weft_moe.check is public and not in the reference" in printed


def test_troubleshooting_knows_every_flag_of_a_stall(root: Path) -> None:
    source = (root / "src/protocol/stall.cpp").read_text()
    names = re.findall(r'return "(\w+)";', source[source.index("flag_name") :])
    assert "entry" in names and "mid_ready" in names
    text = (root / "docs/troubleshooting.md").read_text()
    assert [name for name in names if name != "unknown" and f"`{name}`" not in text] == []
