"""Byte-level text for the trainer: a token is a byte, so that training needs no tokenizer."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .config import DataConfig


def load_text(path: str | None, max_bytes: int) -> np.ndarray:
    """Read text as bytes, files in the order of their names.

    Args:
        path: a file, or a folder of which all files are read; None is the Python sources of
            the interpreter's standard library.
        max_bytes: where to stop.

    Returns:
        uint8 [N], N <= max_bytes.

    Raises:
        ValueError: the path is "", does not exist or cannot be read, or there is not one byte in
            it.
    """
    try:
        return _load_text(path, max_bytes)
    except OSError as error:
        name = "the standard library" if path is None else f"data.path = {path!r}"
        raise ValueError(
            f"{name} cannot be read ({error}): name a file or folder that this user may read"
        ) from error


def _load_text(path: str | None, max_bytes: int) -> np.ndarray:
    if path == "":
        raise ValueError(
            "data.path = '' names nothing: name a text file or a folder, or leave the key out for "
            "Python's standard library"
        )
    if path is None:
        files = _standard_library()
        name = f"the standard library at {sysconfig.get_path('stdlib')}"
    elif Path(path).is_file():
        files, name = [Path(path)], f"data.path = {path!r}"
    elif Path(path).is_dir():
        files = sorted(file for file in Path(path).rglob("*") if file.is_file())
        name = f"data.path = {path!r}"
    else:
        raise ValueError(f"data.path = {path!r} does not exist: name a text file or a folder")

    chunks: list[bytes] = []
    num_missing = max_bytes
    for file in files:
        with file.open("rb") as stream:
            chunks.append(stream.read(num_missing))
        num_missing -= len(chunks[-1])
        if num_missing == 0:
            break
    text = b"".join(chunks)
    if not text:
        raise ValueError(f"{name} is empty: name a file or folder that holds text")
    return np.frombuffer(text, dtype=np.uint8)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    return sorted(
        file for file in root.rglob("*.py") if installed.isdisjoint(file.relative_to(root).parts)
    )


class Batches:
    """Random windows of a text. The windows of a step depend on the seed and the step alone; the
    ranks share them out, so the batch of all ranks together is the same for any number of ranks.
    """

    def __init__(self, config: DataConfig, seed: int, rank: int, num_ranks: int) -> None:
        """Raises ValueError as `load_text`, and when the text is shorter than one window."""
        self.text = load_text(config.path, config.max_bytes)
        self.window = config.sequence_length + 1  # inputs and, one byte later, targets
        if len(self.text) < self.window:
            raise ValueError(
                f"the text has {len(self.text)} bytes, data.sequence_length = "
                f"{config.sequence_length} needs {self.window}: choose a longer text, a larger "
                "data.max_bytes or a shorter sequence"
            )
        self.seed = seed
        self.batch_size = config.batch_size
        share = config.batch_size // num_ranks
        self.mine = slice(rank * share, (rank + 1) * share)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets of a step, each int64 [B, S] on the CPU."""
        random = np.random.default_rng((self.seed, step))
        num_starts = len(self.text) - self.window + 1
        starts = random.integers(num_starts, size=self.batch_size)[self.mine]
        windows = np.stack([self.text[start : start + self.window] for start in starts])
        tokens = torch.from_numpy(windows.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]
