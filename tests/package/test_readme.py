"""The README's Python example runs as printed, and its links lead somewhere."""

import re
from pathlib import Path

import pytest


def test_example_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "torch.Size([100, 256])" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs"])
def test_links_lead_somewhere(root: Path, page: str) -> None:
    pages = sorted((root / page).glob("*.md")) if (root / page).is_dir() else [root / page]
    for path in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.relative_to(root)} links to {target}"
