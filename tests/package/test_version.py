"""The version stands where each tool looks for it, and is the same everywhere."""

import re
from pathlib import Path


def test_all_files_name_one_version(root: Path) -> None:
    def find(path: str, pattern: str) -> str:
        match = re.search(pattern, (root / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert match, f"no version in {path}"
        return match[1]

    header = "include/weft/weft.h"
    parts = (
        find(header, rf"^#define WEFT_VERSION_{part} (\d+)$")
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    version = ".".join(parts)
    assert find("CMakeLists.txt", r"^project\(weft VERSION ([\d.]+) ") == version
    assert find("pyproject.toml", r'^version = "([^"]+)"$') == version
    assert find("python/weft_moe/__init__.py", r'^__version__ = "([^"]+)"$') == version
