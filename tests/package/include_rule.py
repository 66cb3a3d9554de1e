"""The include rule: rooms of src/ include only rooms below them, and some things live in one place only.

Includes point down the list of ROOMS; rooms of one level never include each other. CUDA headers belong to src/cuda and
to the symmetric memory's own .cpp files, torch headers to bindings/torch, environment variables to src/api, and the
public headers show none of them. Run as a program it prints every violation and fails if there is one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Lowest first; the rooms of one tuple are neighbours.
ROOMS = (
    ("core",),
    ("numeric",),
    ("layout",),
    ("schedule", "protocol", "symmetric"),
    ("reference", "cuda"),
    ("api",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
CUDA_HEADER = re.compile(
    r"^(cuda|cub/|thrust/|cooperative_groups|cublas|nccl|nvtx|mma\.h|device_launch|vector_types)"
)
TORCH_HEADER = re.compile(r"^(torch/|ATen/|c10/|pybind11/|Python\.h)")
GETENV = re.compile(r"\b(secure_)?getenv\s*\(")


def violations(root: Path) -> list[str]:
    """Every breach of the rule below `root`, as "path:line: words"."""
    found = []
    for top in ("include", "src", "bindings"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                found += _violations_of(path.relative_to(root), path.read_text())
    return found


def _violations_of(path: Path, text: str) -> list[str]:
    room = path.parts[1] if path.parts[0] == "src" else None
    in_torch = path.parts[:2] == ("bindings", "torch")
    found = []

    def report(position: int, words: str) -> None:
        found.append(f"{path}:{text.count(chr(10), 0, position) + 1}: {words}")

    if room is not None and room not in LEVEL:
        report(
            0,
            f"src/{room} is no room of the include rule: add it to ROOMS in tests/package/include_rule.py",
        )
        return found
    for match in INCLUDE.finditer(text):
        quoted, header = match.group(1) == '"', match.group(2)
        # "cuda/file.hpp" is a room's, which its level decides; <cuda/atomic> and device code are not.
        of_room = room is not None and quoted and not header.endswith(".cuh")
        if CUDA_HEADER.match(header) and not (
            of_room or room == "cuda" or (room == "symmetric" and path.suffix == ".cpp")
        ):
            report(
                match.start(),
                f"<{header}> is a CUDA header: only src/cuda and src/symmetric/*.cpp may include it",
            )
        if TORCH_HEADER.match(header) and not in_torch:
            report(
                match.start(), f"<{header}> is a torch header: only bindings/torch may include it"
            )
        if quoted and room is not None and not header.startswith("weft/"):
            words = _room_violation(room, header)
            if words:
                report(match.start(), words)
        if path.parts[0] == "include" and quoted and not header.startswith("weft/"):
            report(
                match.start(),
                f'"{header}": a public header includes only public headers, as "weft/..."',
            )
    if room != "api":
        for match in GETENV.finditer(text):
            report(
                match.start(),
                "environment variables are read only in src/api: pass the value down instead",
            )
    return found


def _room_violation(room: str, header: str) -> str:
    """Why a file of `room` may not include "header", or ""."""
    other = header.split("/")[0]
    if "/" not in header or other not in LEVEL:
        return f'"{header}": write "room/file.hpp" with a room of src/'
    if other != room and LEVEL[other] >= LEVEL[room]:
        below = ", ".join(name for name, level in LEVEL.items() if level < LEVEL[room])
        return f'"{header}": {room} may include only rooms below it ({below or "none"}), and {other} is not'
    return ""


def main() -> int:
    found = violations(Path(__file__).resolve().parents[2])
    print("\n".join(found) if found else "include rule: no violation")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
