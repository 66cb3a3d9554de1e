"""Elementwise code as one kernel: compiled on a GPU, where each op alone is a pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def fused(function: Callable[..., Result], *tensors: Tensor) -> Result:
    """function(*tensors), on a GPU through torch.compile. `function` is a module's own, so that it
    is compiled once; the first size of every tensor may differ from call to call."""
    if tensors[0].device.type != "cuda":
        return function(*tensors)
    for tensor in tensors:
        # Rows and tokens differ from call to call; widths are constants of a kernel.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(*tensors)


@cache
def _compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    return torch.compile(function, dynamic=False)
