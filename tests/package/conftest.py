"""What the package tests share: where the checkout and its release build are, and how to run a program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def release_build() -> Path:
    build = ROOT / "build" / "release"
    assert (build / "CMakeCache.txt").is_file(), f"{build} is not built: run ./dev build release"
    return build


@pytest.fixture(scope="session")
def run():
    """Runs a program to its end and returns its output; a failure shows all that it printed."""

    def run(*command: str | Path, **kwargs) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs
        )
        assert done.returncode == 0, (
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}"
        )
        return done.stdout

    return run
