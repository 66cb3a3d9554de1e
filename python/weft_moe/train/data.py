"""Text for the trainer as tokens, packed: one document follows another without padding."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .config import NUM_BYTES, DataConfig

# A word with the space before it, white space, or signs: every byte is in one of them.
_WORDS = re.compile(rb" ?\w+|\s+|[^\w\s]+")


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


@lru_cache(maxsize=1)  # several trainings of one process read the same text
def load_tokens(config: DataConfig, vocab_size: int = NUM_BYTES) -> np.ndarray:
    """The text of a configuration as tokens, each 0 to vocab_size - 1.

    Returns:
        int32 [N], read-only.

    Raises:
        ValueError: as `load_text`; or the tokenizer cannot be read, or has a token beyond
            vocab_size.
    """
    text = load_text(config.path, config.max_bytes)
    if config.tokenizer == "bytes":
        tokens = text.astype(np.int32)
    elif config.tokenizer == "words":
        tokens = _words(text.tobytes(), vocab_size)
    else:
        tokens = _tokenized(text.tobytes(), config.tokenizer, vocab_size)
    tokens.flags.writeable = False
    return tokens


def _words(text: bytes, vocab_size: int) -> np.ndarray:
    """Each different word is a token, the commonest 0. The rarest share the last one."""
    words = _WORDS.findall(text)
    counts = Counter(words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    number = {word: min(i, vocab_size - 1) for i, word in enumerate(ranked)}
    return np.fromiter((number[word] for word in words), dtype=np.int32, count=len(words))


def _tokenized(text: bytes, path: str, vocab_size: int) -> np.ndarray:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # tokenizers has no class of its own for what it raises
        raise ValueError(
            f"data.tokenizer = {path!r} cannot be read ({error}): name a tokenizer.json, or choose "
            "'bytes' or 'words'"
        ) from error
    # A character that max_bytes cut is replaced; the tokens before it are the same.
    encoded = tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
    tokens = np.array(encoded.ids, dtype=np.int32)
    if len(tokens) and tokens.max() >= vocab_size:
        raise ValueError(
            f"data.tokenizer = {path!r} gives token {tokens.max()} where the model's vocab_size is "
            f"{vocab_size}: choose the tokenizer of this model, or a larger vocab_size"
        )
    return tokens


class Batches:
    """Random windows of tokens. The windows of a step depend on the seed and the step alone; the
    ranks share them out, so the batch of all ranks together is the same for any number of ranks.
    """

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        rank: int,
        num_ranks: int,
        vocab_size: int = NUM_BYTES,
    ) -> None:
        """Raises ValueError as `load_tokens`, and when the text is shorter than one window."""
        self.tokens = load_tokens(config, vocab_size)
        self.window = config.sequence_length + 1  # inputs and, one token later, targets
        if len(self.tokens) < self.window:
            unit = "bytes" if config.tokenizer == "bytes" else "tokens"
            raise ValueError(
                f"the text has {len(self.tokens)} {unit}, data.sequence_length = "
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
        num_starts = len(self.tokens) - self.window + 1
        starts = random.integers(num_starts, size=self.batch_size)[self.mine]
        windows = np.stack([self.tokens[start : start + self.window] for start in starts])
        tokens = torch.from_numpy(windows.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]
