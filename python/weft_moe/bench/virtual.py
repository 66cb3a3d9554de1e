"""Measures virtual ranks in a process of its own, whose environment is what they need on a GPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from .layer import Case, Row, measure

# Kernels of ranks in one process wait for one another, so no two may share a queue of the driver.
# The driver reads it once, and this process may have started CUDA already.
_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# The longest silence of the process, in seconds: a kernel that never ends can only be killed.
_SILENCE_S = 120.0


def measure_virtual(case: Case, *, note: Callable[[str], None], **options) -> Iterator[Row]:
    """`measure`, in another process.

    Raises:
        ValueError: the process failed, or was silent for too long and was killed.
    """
    torch.cuda.empty_cache()  # the other process needs memory of the same GPU
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_rows, args=(sender, case, options), daemon=True)
    _start_with(process, *_QUEUES)
    sender.close()  # this process's copy: the pipe must end when the other process does
    try:
        while receiver.poll(_SILENCE_S):
            try:
                message = receiver.recv()
            except EOFError:
                break
            if isinstance(message, Row):
                yield message
            else:
                note(message)
        else:
            raise ValueError(
                f"{case.shape}: {case.ep} virtual ranks were silent for {_SILENCE_S:g} s"
            )
        process.join(_SILENCE_S)
        if process.exitcode:
            raise ValueError(
                f"{case.shape}: the process that measures {case.ep} virtual ranks ended with "
                f"{process.exitcode}; its words stand above"
            )
    finally:
        process.kill()
        process.join()


def _start_with(process: BaseProcess, name: str, value: str) -> None:
    """Start a process with one variable of its environment set, whatever this one's is."""
    own = os.environ.get(name)
    os.environ[name] = value
    try:
        process.start()
    finally:
        if own is None:
            del os.environ[name]
        else:
            os.environ[name] = own


def _send_rows(sender: Connection, case: Case, options: dict) -> None:
    for row in measure(case, note=sender.send, **options):
        sender.send(row)
