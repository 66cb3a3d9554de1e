"""The include rule sees what it must see: each planted breach is named, and clean files pass."""

from pathlib import Path

import include_rule
import pytest


def plant(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        (
            "src/numeric/a.hpp",
            '#include "layout/b.hpp"\n',
            "numeric may include only rooms below it (core)",
        ),
        (
            "src/schedule/a.hpp",
            '#include "protocol/b.hpp"\n',
            "schedule may include only rooms below it",
        ),
        (
            "src/core/a.hpp",
            '#include "numeric/b.hpp"\n',
            "core may include only rooms below it (none)",
        ),
        ("src/core/a.hpp", '#include "b.hpp"\n', 'write "room/file.hpp"'),
        ("src/attic/a.hpp", "", "src/attic is no room"),
        ("src/layout/a.hpp", "#include <cuda_runtime.h>\n", "is a CUDA header"),
        ("src/symmetric/a.hpp", "#include <cuda.h>\n", "is a CUDA header"),
        ("src/api/a.cpp", "#include <cuda/atomic>\n", "is a CUDA header"),
        ("src/api/a.cpp", '#include "cuda/tile/b.cuh"\n', "is a CUDA header"),
        (
            "src/reference/a.cpp",
            '#include "cuda/launch/b.hpp"\n',
            "reference may include only rooms below it",
        ),
        ("include/weft/a.h", "#include <cuda_bf16.h>\n", "is a CUDA header"),
        (
            "include/weft/a.hpp",
            '#include "core/status.hpp"\n',
            "a public header includes only public headers",
        ),
        ("src/api/a.cpp", "#include <torch/library.h>\n", "is a torch header"),
        (
            "src/reference/a.cpp",
            'int x = std::getenv("X") != nullptr;\n',
            "environment variables are read only in src/api",
        ),
    ],
)
def test_names_the_breach(tmp_path: Path, path: str, text: str, words: str) -> None:
    plant(tmp_path, path, "// first line\n" + text)
    found = include_rule.violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(path + ":")
    assert words in found[0]


def test_reports_the_line(tmp_path: Path) -> None:
    plant(tmp_path, "src/core/a.hpp", '// one\n// two\n#include "api/c.hpp"\n')
    assert include_rule.violations(tmp_path)[0].startswith("src/core/a.hpp:3: ")


def test_accepts_what_is_allowed(tmp_path: Path) -> None:
    plant(
        tmp_path,
        "src/api/a.cpp",
        '#include <cstdlib>\n#include "reference/b.hpp"\n#include "cuda/launch/c.hpp"\n'
        'auto x = std::getenv("X");\n',
    )
    plant(
        tmp_path,
        "src/cuda/a.cu",
        '#include <cuda_runtime.h>\n#include "layout/b.hpp"\n#include "cuda/c.cuh"\n',
    )
    plant(tmp_path, "src/symmetric/cuda_vmm.cpp", "#include <cuda.h>\n")
    plant(tmp_path, "src/core/a.hpp", '#include "weft/weft.h"\n#include "core/b.hpp"\n')
    plant(
        tmp_path,
        "bindings/torch/a.cpp",
        '#include <torch/csrc/stable/library.h>\n#include "weft/weft.h"\n',
    )
    assert include_rule.violations(tmp_path) == []


def test_the_project_keeps_it() -> None:
    assert include_rule.violations(Path(__file__).resolve().parents[2]) == []
