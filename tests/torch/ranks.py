"""Runs a function on several gloo ranks, each a process of its own, for tests.

The processes are forked from one server that has imported torch already, so a rank costs a few
hundredths of a second and never sees the state of the test process.
"""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed", "transformers.models.qwen3_moe.modeling_qwen3_moe"]
)


class RankError(AssertionError):
    """A rank raised, died or took too long."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout_s: float = 60.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call function(rank, *arguments) on every rank of a gloo process group.

    Args:
        function: a function at module level, so that it can be pickled. torch runs it on one
            thread, inside an initialised default process group.
        num_ranks: how many processes.
        arguments: the same for all ranks; pickled.
        timeout_s: for all ranks together, and for a collective that waits for a rank.
        may_die: ranks that may end without a result, as in a test of what the others then do.

    Returns:
        Each rank's result in rank order; None for a rank that died and might.

    Raises:
        RankError: with the traceback of each rank that raised; or naming the ranks that died or
            were still running at the end of the time, all of which are killed.
    """
    call = pickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(num_ranks):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(rank, num_ranks, rendezvous, timeout_s, sys.path, call, sender),
                daemon=True,
            )
            process.start()
            sender.close()  # this process's copy: the pipe must end when the rank does
            pipes[receiver] = rank
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s, may_die)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    pipes: dict[Connection, int], processes: list, timeout_s: float, may_die: Collection[int]
) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while pipes:
        ready = wait(pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            if not failures:
                late = sorted(pipes.values())
                raise RankError(f"ranks {late} were still running after {timeout_s:g} s")
            break
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                succeeded, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                if rank in may_die:
                    continue
                processes[rank].join()
                succeeded, results[rank] = False, f"died (exit code {processes[rank].exitcode})"
            if not succeeded:
                failures[rank] = results[rank]
                # The others may wait for this rank for ever; they get a moment to fail as well.
                deadline = min(deadline, time.monotonic() + 2.0)
    if failures:
        texts = (f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
        raise RankError("\n".join(texts))
    return results


def _rank_main(
    rank: int,
    num_ranks: int,
    rendezvous: str,
    timeout_s: float,
    path: list[str],
    call: bytes,
    sender: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    sys.path[:] = path  # test modules lie beside this file, not in a package
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        function, arguments = pickle.loads(call)
        message = pickle.dumps((True, function(rank, *arguments)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(message)
    sender.close()
    dist.destroy_process_group()
