"""Loads weft_torch, the compiled ops `torch.ops.weft.*`, and names the numbers they take."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# weft_precision and weft_save of include/weft/weft.h.
PRECISIONS = {"fp64": 0, "fp32": 1, "bf16": 2, "fp8": 3, "fp8_bwd": 4, "mxfp8": 5}
SAVES = {"gate_up": 0, "inputs": 1}


def data_dtype(precision: str) -> torch.dtype:
    """The dtype of x, the weights and y in a precision."""
    return {"fp64": torch.float64, "fp32": torch.float32}.get(precision, torch.bfloat16)


def code(option: str, value: str, codes: dict[str, int]) -> int:
    """The number of an option's value.

    Raises:
        ValueError: names the option, the value and what is allowed.
    """
    if value not in codes:
        allowed = ", ".join(repr(name) for name in codes)
        raise ValueError(f"weft: {option} = {value!r}: choose one of {allowed}")
    return codes[value]


def _load() -> None:
    # An editable install keeps the sources and the compiled files in two folders of one package.
    folders = [Path(folder) for folder in sys.modules[__package__].__path__]
    for folder in folders:
        if (folder / "weft_torch.so").is_file():
            torch.ops.load_library(str(folder / "weft_torch.so"))
            return
    searched = ", ".join(str(folder) for folder in folders)
    raise ImportError(
        f"weft_moe is not built: no weft_torch.so in {searched}. Install the package, with "
        "`pip install --no-build-isolation .`, instead of adding its sources to the path.",
        name="weft_torch",
    )


_load()
